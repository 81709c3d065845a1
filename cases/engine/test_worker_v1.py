"""The v1 worker, which 0.5.12.post1 still has without overlap scheduling, has a defect of its own that is found.

Its eager triton path attends the rows of a draft extend twice (once as cached, once as new), so that it reads slots
that are not there for it, and hidden rows differ from the first extend on; inputs and positions are right, and so is
the text. Not ours: SGLang's own attention kernels under the interpreter (`--cpu-attention interpreted`) give the same
findings.
"""

import pytest

from cases.fixed import DRAIN, request, submit
from cases.programs import program
from harness.contract.types import Kind, Outcome, Phase

RELEASE = "0.5.12.post1"
SCENARIO = program("v1-worker", [request("a", 9, seed=5, new=16)], [submit("a"), DRAIN], overlap_schedule=False)


@pytest.fixture
def outcome(drive_scenario):
    return drive_scenario(SCENARIO, engine=RELEASE)


@pytest.mark.engine(release=RELEASE, boot=SCENARIO.boot_key())
def test_twice_attended_draft_extend_is_found_in_the_slots_that_it_reads(outcome):
    assert outcome.trace.header["worker_generation"] == "v1"
    assert max(length for record in outcome.trace.rounds for length in record.lens if record.mode == "DECODE") > 1
    assert outcome.verdict.outcome is Outcome.FAIL
    assert outcome.first.signature == "CACHE_SLOT:reads:EXTEND:more-than-it-sees"
    assert outcome.text_identical is True


@pytest.mark.engine(release=RELEASE, boot=SCENARIO.boot_key())
def test_every_extend_is_off_from_the_first_on_and_no_prefill_is(outcome):
    (request,) = SCENARIO.requests
    rows = outcome.trace.rows
    extended = set(rows.ints["committed"][rows.strings["phase"] == Phase.EXTEND].tolist())
    wrong = {found.key.committed for found in outcome.divergences if found.key.phase == Phase.EXTEND}
    assert wrong == extended
    assert outcome.first.key.committed == min(extended) == len(request.input_ids)


@pytest.mark.engine(release=RELEASE, boot=SCENARIO.boot_key())
def test_what_the_extend_is_fed_is_right(outcome):
    fed = {Kind.POSITION, Kind.EXTEND_INPUT, Kind.CACHE_SLOT, Kind.SHAPE}
    extends = [found for found in outcome.divergences if found.key.phase == Phase.EXTEND and found.check != "reads"]
    assert [found for found in extends if found.kind in fed] == []
    assert not {Kind.POSITION, Kind.EXTEND_INPUT} & set(outcome.verdict.root_kinds)
