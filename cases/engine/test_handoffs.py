"""Prefill and decode on two real engines: what is handed over is judged, and mutants of it are noticed."""

import pytest
from packaging.version import Version

from cases.boots import BY_NAME
from cases.builder import possible
from cases.engine.explained import explained
from cases.families import FAMILIES
from cases.generation import generate
from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS
from harness.contract.types import Outcome
from harness.search.mutant_results import Status
from harness.search.mutants import Campaign

BASE = FAMILIES["disagg"].scenarios[0].boot_key()
ALL = {scenario.name: scenario for scenario in FAMILIES["disagg"].scenarios if scenario.boot_key() == BASE}
#: One after another on one pair of engines; the last is F-013.
SOUND = ("together", "last-chunk-of-one", "all-end-at-once", "reordered", "failed-beside-good", "all-aborted")
HANDOFFS = [mutant for mutant in MUTANTS.values() if mutant.needs == "handoff"]


@pytest.fixture(autouse=True)
def _driven_since(release):
    if Version(release) < Version("0.5.13"):
        pytest.skip("before 0.5.13 no pair of sides was driven")


@pytest.mark.engine(boot=BASE)
@pytest.mark.parametrize("name", SOUND)
def test_hand_over_changes_nothing_and_every_coverage_point_is_reached(drive_scenario, release, name):
    outcome = drive_scenario(ALL[name], engine=release)
    assert outcome.passed, outcome.verdict.reasons
    assert all(outcome.verdict.coverage.get(wanted) for wanted in ALL[name].wants)


@pytest.mark.engine(boot=BASE)
def test_draft_state_of_a_request_taken_back_by_the_decode_side_is_the_one_it_arrived_with(drive_scenario, release):
    outcome = drive_scenario(ALL["retracted"], engine=release)
    assert outcome.verdict.outcome is Outcome.FAIL
    assert outcome.first.signature.startswith("NUMERIC:handoff:PREBUILT:hidden_out-")
    assert outcome.first.key.attempt == 1
    assert outcome.text_identical is True


@pytest.mark.engine(boot=EXERCISES["handoff"][0].boot_key())
def test_mutants_of_a_hand_over_are_killed(engines):
    report = Campaign(engines, engines.default, HANDOFFS).run()
    assert report.unsound == (), "the engines must pass without a mutant, before and after"
    assert {score.mutant.id: score.why for score in report.scores if score.status is not Status.KILLED} == {}


@pytest.mark.engine(boot=BASE)
def test_generated_hand_overs_pass_and_bring_about_what_they_ask_for(drive_scenario, release):
    met = set()
    for scenario in generate(BY_NAME["pd"], count=len(possible(BY_NAME["pd"])), seed=7):
        outcome = drive_scenario(scenario, engine=release)
        known = explained(outcome, release, place="generated/disagg/pd")
        met.update(known)
        assert outcome.passed or known, (scenario.name, outcome.verdict.reasons)
    if met:
        pytest.xfail(f"known: {', '.join(sorted(met))}")


@pytest.mark.engine(boot=BASE)
def test_builder_of_the_release_takes_requests_and_raises_without_them(drive_scenario, release):
    answers = drive_scenario(ALL["together"], engine=release).trace.header["component"]
    assert answers["two requests"]["outcome"] == "built"
    assert {answers[case]["outcome"] for case in ("no request", "no hidden state")} == {"raises"}
