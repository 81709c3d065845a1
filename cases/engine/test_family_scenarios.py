"""Families beside the default one: some of their fixed scenarios pass, and F-003 is what it is called."""

from pathlib import Path

import pytest
from packaging.version import Version

from cases.boots import BY_NAME
from cases.catalogue import read_scenario
from cases.families import FAMILIES
from harness.checks.judge import judge
from harness.contract.types import Outcome
from harness.driving.pairs import checkpoint_pairs
from harness.driving.refusals import refusal

FOLDER = Path(__file__).parents[1] / "scenarios"
REPRODUCER = read_scenario(FOLDER / "tree-slot-cache.json")
TAKEN_BACK = next(one for one in FAMILIES["weights"].scenarios if one.name == "weights-taken-back")
#: F-006 and F-015: heads that load without a word and run otherwise than their config says.
MISREAD = [read_scenario(FOLDER / f"eagle3-{name}.json") for name in ("one-feature", "normed-residual")]


def test_family_scenario_passes(drive_scenario, release, family_scenario, request):
    """`pytest --family NAME` drives all of one family's, whatever the release's own bugs make of them."""
    if why := refusal(family_scenario, version=release, device=drive_scenario.device):
        pytest.skip(why)
    if Version(release) < Version("0.5.13") and not request.config.getoption("--family"):
        pytest.skip("before 0.5.13 the release's own bugs come first")
    outcome = drive_scenario(family_scenario, engine=release)
    assert outcome.passed, outcome.verdict.reasons
    assert all(outcome.verdict.coverage.get(name) for name in family_scenario.wants)


@pytest.mark.engine(boot=TAKEN_BACK.boot_key(), ends_it=True)
def test_requests_that_run_go_on_with_new_weights(drive_scenario, release):
    if not BY_NAME["weights"].planned_on(release):
        pytest.skip("older releases end where requests wait while weights change")
    outcome = drive_scenario(TAKEN_BACK, engine=release)
    assert outcome.passed, outcome.verdict.reasons
    assert outcome.verdict.coverage["updated_while_running"] > 1


@pytest.mark.engine(boot=REPRODUCER.boot_key())
def test_beams_attend_their_slots_and_assuming_it_explains_everything(drive_scenario, release):
    from harness.driving.oracle import Oracle

    outcome = drive_scenario(REPRODUCER, engine=release)
    assert outcome.verdict.outcome is Outcome.FAIL
    assert outcome.first.signature == "CACHE_SLOT:beams:DRAFT:rows-of-own-number"
    target, draft = checkpoint_pairs([REPRODUCER])[REPRODUCER.checkpoint]
    reference = Oracle(target=target, draft=draft, assumed=("F-003",)).answer(REPRODUCER, outcome.trace)
    verdict, divergences = judge(REPRODUCER, outcome.trace, reference)
    assert divergences == []
    assert verdict.outcome is Outcome.PASS


@pytest.mark.parametrize(
    "scenario", [pytest.param(one, id=one.name, marks=pytest.mark.engine(boot=one.boot_key())) for one in MISREAD]
)
def test_heads_that_are_run_otherwise_than_their_config_says_are_found(drive_scenario, release, scenario):
    if Version(release) < Version("0.5.13"):
        pytest.skip("before 0.5.13 the release's own bugs come first")
    outcome = drive_scenario(scenario, engine=release)
    assert outcome.verdict.outcome is Outcome.FAIL
    assert outcome.first.signature == "NUMERIC:extend:DRAFT_PREFILL:hidden_out-off"
    assert outcome.text_identical is True
