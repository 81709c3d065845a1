"""Sampling: what recorded uniforms decide is decided so, and many together give the target's own distribution."""

from pathlib import Path

import pytest

from cases.catalogue import read_scenario
from cases.meta.sampling import DRAFTS, Counts, sampled_scenarios
from harness.contract.types import Phase

FOLDER = Path(__file__).parents[1] / "scenarios"
AMONG_GREEDY = {name: read_scenario(FOLDER / f"sampled-{name}.json") for name in ("chain", "tree")}
COUNT = 16
SAMPLED = {draft: list(sampled_scenarios(draft, count=COUNT)) for draft in DRAFTS}
RELEASES = ("0.5.13", "0.5.23")


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, id=name, marks=pytest.mark.engine(boot=one.boot_key())) for name, one in AMONG_GREEDY.items()],
)
@pytest.mark.parametrize("release", RELEASES)
def test_every_sampled_round_is_what_its_uniforms_decide_and_greedy_neighbours_stay_greedy(
    drive_scenario, release, scenario
):
    outcome = drive_scenario(scenario, engine=release)
    assert outcome.passed, outcome.verdict.reasons
    uniforms = [event.data["uniforms"] for event in outcome.trace.named("uniforms")]
    sampled = {request.rid for request in scenario.requests if request.temperature > 0}
    assert sampled <= set().union(*uniforms)
    drawn = outcome.trace.rows.strings["rid"][outcome.trace.rows.strings["phase"] == Phase.ACCEPT]
    assert all((drawn == rid).sum() > 8 for rid in sampled)
    sampled_by_reference = {event.data["rid"] for event in outcome.reference.named("sampled")}
    assert sampled_by_reference == sampled


@pytest.mark.parametrize(
    "draft", [pytest.param(name, marks=pytest.mark.engine(boot=SAMPLED[name][0].boot_key())) for name in SAMPLED]
)
@pytest.mark.parametrize("release", RELEASES)
def test_committed_tokens_have_the_distribution_of_their_position(drive_scenario, release, draft):
    counts = Counts(temperature=1.0)
    for scenario in SAMPLED[draft]:
        outcome = drive_scenario(scenario, engine=release, fresh=True)
        assert outcome.passed, outcome.verdict.reasons
        counts.add(scenario, outcome.trace)
    assert counts.misplaced == 0
    assert sum(counts.cells["prompt", 2]) == 8 * COUNT
    cells_of_all_tests = 16 * len(DRAFTS) * len(RELEASES)
    assert counts.misfits(tests=cells_of_all_tests) == []
