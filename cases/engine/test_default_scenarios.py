"""The default scenarios against the reference, one by one, and what they leave untested taken together."""

from collections import Counter

import pytest

from cases.boots import BY_NAME
from cases.fixed import default_scenarios
from cases.fixed_parts import parts
from harness.checks.coverage import OWN_KERNEL, SUBJECTS
from harness.checks.registry import COMPARED
from harness.contract.merge import merge
from harness.contract.types import Outcome

pytestmark = [pytest.mark.also_on("0.5.13")]

#: Every accept length must be this frequent, or the drafts agree too seldom or too often to test anything.
LEAST_SHARE = 0.05

SCENARIOS = [pytest.param(scenario, id=scenario.name) for scenario in default_scenarios()]
BOOT = default_scenarios()[0].boot_key()


@pytest.mark.engine
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_engine_equals_the_reference(drive_scenario, release, scenario):
    outcome = drive_scenario(scenario, engine=release)
    assert outcome.verdict.outcome is Outcome.PASS, outcome.verdict.reasons
    assert outcome.divergences == ()
    # In half precision a near tie may be decided otherwise; then the verdict has counted it.
    narrow = outcome.trace.header["dtype"] != "float32"
    assert outcome.text_identical is True or (narrow and outcome.verdict.ties > 0)


@pytest.mark.engine
@pytest.mark.parametrize("scenario", parts(BY_NAME["plain"], only=("some-taken-back",)))
def test_what_is_taken_back_in_part_is_told_and_comes_back(drive_scenario, release, scenario):
    outcome = drive_scenario(scenario, engine=release)
    assert outcome.verdict.outcome is Outcome.PASS, outcome.verdict.reasons
    told = [event.data for event in outcome.trace.named("retract")]
    assert told
    assert {one["reason"] for one in told} == {"asked"}
    assert all(one["kept"] for one in told)


@pytest.mark.engine(boot=BOOT)
def test_default_scenarios_leave_no_comparison_empty(drive_scenario, release):
    outcomes = [drive_scenario(scenario, engine=release) for scenario in default_scenarios()]
    replaced = outcomes[0].trace.header["replaced"]
    ours = {entry["subject"] for entry in replaced if entry["by"] != OWN_KERNEL}
    exempt = {name for subject in ours for name in SUBJECTS.get(subject, ())}
    assert set(merge([outcome.verdict for outcome in outcomes]).compared) == set(COMPARED) - exempt


@pytest.mark.engine(boot=BOOT)
def test_every_accept_length_occurs_often_enough(drive_scenario, release):
    lengths = Counter()
    for scenario in default_scenarios():
        for record in drive_scenario(scenario, engine=release).trace.rounds:
            lengths.update(length for length in record.lens if record.mode == "DECODE" and length)
    share = {length: count / lengths.total() for length, count in lengths.items()}
    assert set(share) == {1, 2, 3, 4}
    assert min(share.values()) >= LEAST_SHARE, share


@pytest.mark.engine(boot=BOOT)
def test_newest_tree_kernels_are_the_releases_own(drive_scenario, release):
    """From 0.5.17 on SGLang's own Triton kernels build and walk the tree, so parents and accepts are exercised."""
    header = drive_scenario(default_scenarios()[0], engine=release).trace.header
    replaced = {entry["subject"] for entry in header["replaced"] if entry["by"] == "stand-in"}
    assert replaced <= ({"attention", "tree", "verify"} if release == "0.5.13" else {"attention"})
