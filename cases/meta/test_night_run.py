"""How cells are driven and counted, on engines that answer by hand: boxes, repeats, no engine, faults of our own."""

from __future__ import annotations

import errno
import re
import time

import pytest
from packaging.version import Version

from cases.boots import BY_NAME
from cases.families import FAMILIES
from cases.meta import results
from cases.meta.nights import AHEAD, ByHand
from harness.archive.faults import WriteError
from harness.archive.store import read_reproducer
from harness.contract.finding_pages import issues
from harness.contract.trace import Event
from harness.contract.types import Outcome
from harness.driving.accept_lengths import observed_lengths
from harness.driving.refusals import refusal
from harness.engines.envs import SUPPORTED
from harness.engines.errors import EngineError
from harness.night import cells, mutated
from harness.night.run import Driver
from harness.search.mutant_results import Explanation, Result, Status
from harness.search.mutate_report import Report

CAMPAIGN = results.campaign(*map(results.asked, "xyz"))


def fixed(*names, **changes):
    return cells.Cell(
        engine="0.5.13", kind="fixed", name="eagle", scenarios=tuple(results.named(one) for one in names), **changes
    )


def drive(engines, cell, folder, **options):
    found = []
    Driver(make=lambda: engines, folder=folder, done=found.append, **options).run([cell])
    (result,) = found
    return result


def test_scenarios_are_counted_and_the_engine_is_ended(tmp_path):
    engines = ByHand(results.sound)
    found = drive(engines, fixed("a", "b"), tmp_path)
    assert (found.verdict, found.scenarios, found.failed, found.findings) == (Outcome.PASS, 2, 0, ())
    assert engines.driven == ["a", "b"]
    assert engines.closed == 1
    assert found.choices > 0
    assert (found.boots, found.waited) == (2, 5.0)


def test_a_failing_scenario_is_driven_again_and_kept(tmp_path):
    engines = ByHand(results.one_ahead)
    found = drive(engines, fixed("a", "b"), tmp_path, repeats=2)
    assert engines.driven == ["a", "a", "a", "b"], "at once, while its engine is there"
    (seen,) = found.findings
    assert (seen.signature, seen.scenarios, seen.shown, seen.tried) == (AHEAD, 2, 3, 3)
    manifest, stored = read_reproducer(tmp_path / seen.reproducer)
    assert (manifest.signature, stored.scenario.name) == (AHEAD, "a")


def ended_from_outside(engine):
    what = Event(name="lost", scheduler_step=1, data={"what": "ended from outside: x"})
    object.__setattr__(engine, "events", (*engine.events[:1], what))


@pytest.mark.parametrize(
    ("then", "tried"),
    [(results.sound, 5), (EngineError("gone"), 1), (ended_from_outside, 1)],
    ids=["it does not come back", "the engine does not", "somebody ends it"],
)
def test_a_repeat_counts_only_where_its_engine_lives(tmp_path, then, tried):
    found = drive(ByHand(results.one_ahead, then), fixed("a"), tmp_path, repeats=4)
    assert (found.verdict, found.scenarios, found.unknown) == (Outcome.FAIL, 1, 0)
    assert [(seen.shown, seen.tried) for seen in found.findings] == [(1, tried)]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (ended_from_outside, "ended from outside: x"),
        (ValueError("oh"), "internal error of eaglecheck in a: ValueError: oh"),
    ],
)
def test_what_is_not_sglangs_doing_is_unknown_and_costs_one_scenario(tmp_path, first, reason):
    found = drive(ByHand(first, results.sound), fixed("a", "b"), tmp_path)
    assert (found.verdict, found.failed, found.unknown, found.findings) == (Outcome.UNKNOWN, 0, 1, ())
    assert (found.scenarios, found.reasons) == (2, (reason,))


def test_what_could_not_start_once_is_not_started_for_the_next_scenario(tmp_path):
    engines = ByHand(EngineError("no engine; it ends with:\n  why"))
    found = drive(engines, fixed("a", "b", "c"), tmp_path)
    assert (found.verdict, found.unknown, found.scenarios) == (Outcome.UNKNOWN, 3, 3)
    assert engines.driven == ["a"]
    assert found.reasons == ("no engine; it ends with:\n  why (in 3 scenarios)",)


def test_a_full_disk_ends_the_night(tmp_path):
    engines = ByHand(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(WriteError, match="the disk is full"):
        drive(engines, fixed("a"), tmp_path)
    assert engines.closed == 1


@pytest.fixture
def drawn(monkeypatch):
    """A generated cell of three scenarios that were not drawn."""
    monkeypatch.setattr("cases.generation.generate", lambda _boot, **_o: [results.named(one) for one in "abc"])

    def cell(seconds):
        draw = cells.Draw(boot=BY_NAME["plain"], count=3, seconds=seconds, seed=1)
        return cells.Cell(engine="0.5.13", kind="generated", name="eagle/plain", draw=draw)

    return cell


def test_a_box_holds_at_least_one_scenario_and_says_how_many_it_left_out(drawn, tmp_path):
    found = drive(ByHand(results.sound), drawn(0.0), tmp_path)
    assert (found.scenarios, found.left_out) == (1, 2)
    assert drive(ByHand(results.sound), drawn(600.0), tmp_path).left_out == 0


def test_the_engine_of_the_next_cell_boots_beside_the_one_that_is_driven(tmp_path):
    made = [cells.Cell(engine=one, kind="fixed", name="x", scenarios=(results.named("a"),)) for one in ("1", "2", "3")]
    engines = ByHand(results.sound)
    Driver(make=lambda: engines, folder=tmp_path).run(made)
    assert engines.expected == [("2", "a"), ("3", "a")]


def test_cells_are_driven_by_their_engines(tmp_path):
    made = [cells.Cell(engine=one, kind="fixed", name="x", scenarios=(results.named("a"),)) for one in ("2", "1", "2b")]
    done = []
    Driver(make=lambda: ByHand(results.sound), folder=tmp_path, done=lambda one: done.append(one.key)).run(made)
    assert done == sorted(one.key for one in made)


def test_accept_lengths_are_counted_by_verify():
    trace, _ = results.traces(results.named("a"))
    counts = observed_lengths(trace)
    rows = trace.rows.strings["phase"] == "ACCEPT"
    assert counts.total() == rows.sum()
    assert len(set(counts.values())) > 1


def test_a_mutant_that_survives_and_nobody_explained_is_a_finding_of_its_cell(tmp_path):
    cell = cells.Cell(engine="0.5.23", kind="mutated", name="eagle", scenarios=(results.named("a"),))
    became = {one.id: one for one in (Result(id="x", end=Status.SURVIVED), Result(id="y", end=Status.KILLED))}
    found = mutated._result(cell, Report.of(CAMPAIGN, became, {}), start=time.monotonic())
    assert (found.verdict, found.scenarios, found.failed, found.left_out) == (Outcome.FAIL, 2, 1, 1)
    (seen,) = found.findings
    assert seen.signature == "SURVIVED:srt/speculative/one.py:f:slice"
    why = Explanation(kind="equivalent", why="never read", mutants=("x",))
    explained = mutated._result(cell, Report.of(CAMPAIGN, became, {"x": why}), start=time.monotonic())
    assert (explained.verdict, explained.findings) == (Outcome.PASS, ())
    assert found.drawn, "another night asks other mutants"
    assert found.board["counts"] == {"survived": 1, "killed": 1}


def test_a_cell_whose_time_is_over_before_a_mutant_says_so(tmp_path):
    cell = cells.Cell(engine="0.5.23", kind="mutated", name="eagle", scenarios=(results.named("a"),))
    why = mutated._nothing_asked(CAMPAIGN, 60.0)
    found = mutated._result(cell, Report.of(CAMPAIGN, {}, {}), start=time.monotonic(), why=why)
    assert (found.verdict, found.scenarios + found.left_out) == (Outcome.UNKNOWN, len(CAMPAIGN.mutants))
    (reason,) = found.reasons
    assert "--seconds 60" in reason


def test_mutants_are_planned_on_a_cpu_when_they_are_asked_for():
    limits = cells.Limits(scenarios=0, seconds=60, seed=7, mutants=3)
    planned, _ = cells.plan(engines=["0.5.23"], cases=[], families=[FAMILIES["tree"]], limits=limits)
    assert planned[-1].key == "0.5.23/mutated/tree"
    assert (planned[-1].mutants.count, planned[-1].mutants.seed) == (3, 7)
    on_card, _ = cells.plan(
        engines=["0.5.23"], cases=[], families=[FAMILIES["tree"]], limits=limits, place=cells.Place(device="cuda")
    )
    assert {cell.kind for cell in on_card} == {"fixed"}


def test_a_boot_configuration_is_a_cell_and_what_has_none_is_left_out_by_name():
    tree = FAMILIES["tree"]
    limits = cells.Limits(scenarios=0, seconds=60, seed=7)
    (first, *rest), _ = cells.plan(engines=["0.5.23"], cases=[], families=[tree], limits=limits)
    assert first.key == "0.5.23/fixed/tree/t2-four-together"
    for cell in (first, *rest):
        assert len({one.boot_key() for one in cell.scenarios}) == 1
    assert [one for cell in (first, *rest) for one in cell.scenarios] == list(tree.scenarios)
    families = [FAMILIES[name] for name in ("tp", "hicache")]
    made, left_out = cells.plan(
        engines=["0.5.13"], cases=[], families=families, limits=limits, place=cells.Place(cards=2)
    )
    driven = {one.name for cell in made for one in cell.scenarios}
    left = {one.scenario: one.why for one in left_out}
    assert driven.isdisjoint(left)
    assert driven | set(left) == {one.name for family in families for one in family.scenarios}
    assert left["tp-four-four-together"] == "it needs 4 GPUs, of 2 that are there"
    why = BY_NAME["tp-layers"].before
    assert left["tp-layers-four-together"] == f"not in nights before 0.5.17, though run drives it ({why})"
    assert "it is not driven on SGLang 0.5.13" in left["hicache-evicted"]


@pytest.mark.parametrize("release", [*SUPPORTED, "0.5.17"])
def test_it_is_said_that_a_scenario_cannot_be_driven_only_where_run_refuses_it(release):
    every = list(FAMILIES.values())
    driven = {(family.name, one.name): one for family in every for one in family.scenarios}
    limits = cells.Limits(scenarios=0, seconds=60, seed=7)
    for left in cells.plan(engines=[release], cases=[], families=every, limits=limits)[1]:
        refused = refusal(driven[left.family, left.scenario], version=release, device="cpu")
        assert bool(refused) is not left.why.startswith("not in nights before "), left
        assert "was not looked at" not in left.why, left


@pytest.mark.parametrize("boot", [one for one in BY_NAME.values() if "F-" in one.before], ids=lambda boot: boot.name)
def test_findings_that_keep_older_releases_out_of_nights_are_of_such_releases(boot):
    for name in re.findall(r"F-\d+", boot.before):
        assert Version(issues()[name].releases.first) < Version(boot.since)
