"""`eaglecheck fuzz`: what it drives, how it ends, and that what fails is made small. No engine here."""

import json
from types import SimpleNamespace

import pytest

from cases.boots import BY_NAME
from cases.families import FAMILIES
from cases.generation import generate, greedy
from cases.meta import pretended_engine, results
from cases.meta.command_line import call
from harness.cli import fuzz
from harness.contract.types import Outcome
from harness.driving.plan import Setup
from harness.engines import envs
from harness.search import fuzz as making
from harness.search.shrink import Budget

#: What `fuzz` draws from without `--family`.
BOOTS = {boot.name: boot for boot in FAMILIES["eagle"].boots}


@pytest.fixture
def driven(work, monkeypatch):
    """fuzz with these results; the plans that it had run."""
    pretended_engine.furnish(work / "home", published=envs.SUPPORTED)
    plans = []

    def drive(*arguments, found=(results.judged("one"),), code=None):
        monkeypatch.setattr(fuzz, "run", lambda plan, **_: plans.append(plan) or results.run_of(*found))
        return call("fuzz", "--engine", "0.5.23", *arguments, code=code), plans

    return drive


def test_the_scenarios_of_a_seed_are_driven_boot_by_boot(driven):
    done, (plan,) = driven("--examples", str(2 * len(BOOTS)), "--seed", "7", "--seconds", "60", code=0)
    assert list(plan.scenarios) == [one for boot in BOOTS.values() for one in generate(boot, count=2, seed=7)]
    assert plan.time_limit == 60 / len(BOOTS)
    assert "--seed 7" in done.output


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--prompts", "prompts.txt"], "name one:  --target FOLDER --draft FOLDER"),
        (["--reference", "witness", "--assume", "F-003"], "allowed: --reference paper"),
        (["--reference-device", "cuda"], "the tiny pairs are computed on the CPU"),
        (["--gpu-share", "1"], "there is no GPU on cpu"),
        (["--runs", "-"], "--runs -: not written to standard output"),
    ],
)
def test_nothing_is_said_of_a_plan_that_is_refused(asked, said, driven):
    done, plans = driven("--examples", "2", *asked)
    assert (done.exit_code, done.stdout, plans) == (2, "", [])
    assert said in done.stderr


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 11, 12])
def test_examples_are_scenarios_in_all_and_boots_take_turns(driven, count):
    done, (plan,) = driven("--examples", str(count), "--seed", "5", "--seconds", "60", code=0)
    names = list(BOOTS)
    shares = [len([one for one in range(count) if one % len(names) == place]) for place in range(len(names))]
    wanted = [
        one
        for boot, share in zip(BOOTS.values(), shares, strict=True)
        for one in generate(boot, count=max(shares), seed=5)[:share]  # the same scenario i of a boot, however many
    ]
    assert (len(plan.scenarios), list(plan.scenarios)) == (count, wanted)
    assert plan.time_limit == 60 / min(count, len(names))
    left = names[count:]
    assert ("left out, since" in done.output) == bool(left)
    if left:
        assert f"too few: {', '.join(left)}\n" in done.output
        assert f"--boot {left[0]}" in done.output
        assert f"--examples {len(names)}\n" in done.output


@pytest.mark.parametrize(("seconds", "worth"), [("2", 1), ("50", 1), ("95", 3), (str(30 * len(BOOTS)), len(BOOTS))])
def test_no_more_engines_boot_than_the_seconds_are_worth(driven, seconds, worth):
    done, (plan,) = driven("--seconds", seconds, "--seed", "5", code=0)
    driven_on = {one.boot_key() for one in plan.scenarios}
    assert (len(driven_on), plan.time_limit) == (worth, float(seconds) / worth)
    left = [name for name, boot in BOOTS.items() if boot.boot_key() not in driven_on]
    assert len(left) == len(BOOTS) - worth
    assert ("are worth no more boots" in done.output) == bool(left)
    if left:
        assert f"others): {', '.join(left)}\n  choose by name:  --boot {left[0]}; or take every one:" in done.output


def test_another_seed_boots_others_and_boots_that_are_named_all_boot(driven):
    taken = set()
    for seed in range(20):
        _, plans = driven("--seconds", "30", "--seed", str(seed))
        taken |= {one.boot_key() for one in plans[-1].scenarios}
    assert taken == {boot.boot_key() for boot in BOOTS.values()}
    names = list(BOOTS)[:3]
    done, plans = driven("--seconds", "2", *(part for name in names for part in ("--boot", name)))
    assert len({one.boot_key() for one in plans[-1].scenarios}) == 3, done.output


def test_boots_are_named_and_what_they_need_is_assumed(driven, tmp_path):
    done, (plan,) = driven("--family", "tree", "--boot", "deep-tree", "--examples", "3", "--json", "found.json", code=0)
    assert {one.boot_key() for one in plan.scenarios} == {BY_NAME["deep-tree"].boot_key()}
    assert (len(plan.scenarios), plan.setup.assumed, plan.time_limit) == (3, BY_NAME["deep-tree"].assumes, None)
    assert "F-003" in plan.setup.assumed
    seed = json.loads((tmp_path / "found.json").read_text())["seed"]
    assert plan.scenarios == tuple(generate(BY_NAME["deep-tree"], count=3, seed=seed))
    assert f"--seed {seed}" in done.output


def test_a_witness_gets_greedy_tokens_and_nothing_to_predict(driven):
    done, (plan,) = driven("--reference", "witness", "--boot", "plain", "--examples", "20", "--seed", "7", code=0)
    assert (plan.setup.reference, plan.setup.assumed) == ("witness", ())
    assert list(plan.scenarios) == list(greedy(generate(BOOTS["plain"], count=20, seed=7)))
    assert f"{len(plan.scenarios)} scenarios of 20, of greedy tokens alone" in done.output
    done, _ = driven("--reference", "witness", "--boot", "plain", "--examples", "20", "--assume", "F-037")
    assert (done.exit_code, "predicts nothing" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--family", "trees"), "did you mean 'tree'"),
        (("--boot", "plane"), "did you mean 'plain'"),
        (("--examples", "0"), "--examples"),
    ],
)
def test_what_cannot_be_is_refused(driven, arguments, message):
    done, plans = driven(*arguments)
    assert (done.exit_code, plans) == (2, [])
    assert message in done.output


def test_exit_code_is_the_verdicts_and_no_engine_is_started_without_shrinking(driven):
    broken = results.judged("one", results.one_ahead)
    driven("--shrink", "0", found=[broken], code=1)
    driven("--shrink", "0", found=[results.without_engine("one", "no engine")], code=3)


class Pretended:
    """An engine on which everything is one position ahead, whatever is driven."""

    def __init__(self, **_options):
        self.driven = []

    def __call__(self, scenario, **_options):
        self.driven.append(scenario)
        found = results.judged("one", results.one_ahead)
        return SimpleNamespace(
            findings=found.findings, save_reproducer=lambda folder: folder / "reproducers" / scenario.id
        )

    def close(self):
        self.driven = None


def test_each_root_finding_gets_the_smallest_scenario_that_shows_it(monkeypatch):
    monkeypatch.setattr(making, "LiveEngines", Pretended)
    result = results.run_of(results.judged("one", results.one_ahead), results.judged("two"))
    assert result.verdict.outcome is Outcome.FAIL
    setup = Setup(release="0.5.23", reference="paper")
    plan = SimpleNamespace(env=SimpleNamespace(version="0.5.23"), setup=setup, lease=None, copies=False, own=None)
    seen = []
    found = list(making.reproducers(plan, result, budget=Budget(seconds=900), started=seen.append))
    assert [one.signature for one, _, _ in found] == [one.signature for one in seen]
    assert "POSITION:positions:DRAFT:one-ahead" in {one.signature for one, _, _ in found}
    for one, small, folder in found:
        assert len(small.requests) == 1 < len(one.smallest.requests)
        assert folder == result.folder / "reproducers" / small.id
