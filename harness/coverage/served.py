"""Coverage points of who is served: requests at the limits, and aborts while nothing runs."""

from __future__ import annotations

from collections.abc import Iterator

from harness.contract.admission import EXHAUSTED, too_long
from harness.contract.answers import errors
from harness.contract.batches import Part
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.coverage.points import Place, coverage_point, parts_of_request, verifies


@coverage_point("a request that is too long, and refused")
def too_long_refused(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for request in scenario.requests:
        if request.rid in errors(trace) and too_long(request, scenario.spec, scenario.engine):
            yield None


@coverage_point("a verify with several samples of one request")
def samples_of_one_prompt(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    names = {run.rid for one in scenario.requests for run in one.runs}
    readers = [name for name in names if name.endswith(".0")]  # who reads the prompt for all samples
    for reader in readers:
        own = {name for name in names if name.startswith(reader[:-1])} - {reader}
        yield from (record for record in verifies(trace) if len(own & set(record.rids)) > 1)


@coverage_point("a request that asks for no number of tokens, and ends by itself")
def unlimited_ended(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    unlimited = {one.rid for one in scenario.requests if one.unlimited}
    for end in trace.ends:
        if end.rid in unlimited and end.reason in ("stop", "length"):
            yield from parts_of_request(trace, end.rid)[-1:]


@coverage_point("a request refused because as many wait as may")
def full_queue_refused(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (None for error in errors(trace).values() if "queue is full" in error)


@coverage_point("a request that outgrew the pool while no other was left in it, and was given up")
def outgrew_the_pool(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    given_up = (rid for rid, error in errors(trace).items() if EXHAUSTED in error)
    yield from (parts_of_request(trace, rid)[-1] for rid in given_up if parts_of_request(trace, rid))


@coverage_point("a request aborted while the loop was paused")
def abort_while_paused(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    paused = False
    for event in trace.events:
        paused = event.name == "pause" or (paused and event.name != "resume")
        if event.name == "abort" and paused and (parts := _before(trace, event.data.get("rid"), event.scheduler_step)):
            yield parts[-1]


@coverage_point("a request aborted while it waited to come back after a retraction")
def abort_after_retraction(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    waiting: set[str] = set()
    for event in trace.events:
        if event.name == "turn":
            waiting = set(event.data.get("waiting", ()))
        elif event.name == "retract":
            waiting |= set(event.data.get("rids") or [request.rid for request in scenario.requests])
        elif event.name == "abort" and event.data.get("rid") in waiting:
            yield from _before(trace, event.data.get("rid"), event.scheduler_step)[-1:]


def _before(trace: Trace, rid: object, step: int) -> list[Part]:
    """What a request whose prompt was prefilled had done before a step; nothing if it was not."""
    parts = [part for part in parts_of_request(trace, str(rid)) if part.record.scheduler_step < step]
    return parts if any(part.final or part.record.mode == "DECODE" for part in parts) else []
