"""Which requests share a batch is decided by the scenario, step by step."""

import pytest

from cases.fixed import DRAIN, request, steps, submit
from cases.programs import DEFAULT, program


def later(later_by):
    """b arrives so many scheduler steps after a, which is long enough to be still running."""
    return program(
        f"b-after-{later_by}",
        [request("a", 9, seed=5, new=24), request("b", 6, seed=6, new=3)],
        [submit("a"), steps(later_by), submit("b"), DRAIN],
    )


LATER = [pytest.param(later_by, later(later_by), id=str(later_by)) for later_by in (1, 3, 6)]


def _first_prefill(trace, rid):
    return next(record.scheduler_step for record in trace.rounds if record.mode == "PREFILL" and rid in record.rids)


@pytest.mark.engine
@pytest.mark.also_on("0.5.13", "0.5.12.post1")
@pytest.mark.parametrize(("later_by", "scenario"), LATER)
def test_request_is_admitted_exactly_as_many_steps_later_as_asked(drive_scenario, release, later_by, scenario):
    trace = drive_scenario(scenario, engine=release).trace
    assert _first_prefill(trace, "a") == 0
    assert _first_prefill(trace, "b") == later_by


@pytest.mark.engine(boot=DEFAULT["single"].boot_key())
def test_requests_of_one_step_share_their_batches_in_the_order_announced(drive_scenario):
    trace = drive_scenario(DEFAULT["four-together"]).trace
    assert trace.rounds[0].rids == tuple("abcd")
    assert {record.scheduler_step for record in trace.rounds if record.mode == "PREFILL"} == {0}


@pytest.mark.engine(boot=DEFAULT["single"].boot_key())
def test_steps_without_work_are_idle_and_still_counted(drive_scenario):
    trace = drive_scenario(DEFAULT["idle-between"]).trace
    (second,) = (event.scheduler_step for event in trace.named("submit") if event.data["rid"] == "b")
    assert second == 24 == _first_prefill(trace, "b")
    busy = {record.scheduler_step for record in trace.rounds if record.rids}
    assert max(scheduler_step for scheduler_step in busy if scheduler_step < second) < second - 1
