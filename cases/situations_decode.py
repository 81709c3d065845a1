"""Situations of batches in decode and of what a verify accepts. See `cases/situations`."""

from __future__ import annotations

from collections.abc import Iterator

from cases.situation_words import Place, finished, last_output, neighbours, situation, verifies, verify_parts
from harness.contract.batches import leading_rounds
from harness.contract.trace import Trace
from harness.contract.types import Scenario

#: k is at most 16, so an accept length is at most 17.
LONGEST_ACCEPT = 17


@situation("every request of a batch finished in the same verify")
def all_finished_in_one_verify(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (r for r in verifies(trace) if len(finished(scenario, trace, r)) == len(r.rids))


@situation("some but not all requests of a batch finished in one verify")
def some_finished(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (r for r in verifies(trace) if 0 < len(finished(scenario, trace, r)) < len(r.rids))


@situation("every request finished in one verify and the rank's next batch prefills a new one")
def all_finished_with_arrival(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for before, after in neighbours(leading_rounds(trace)):
        emptied = before.mode == "DECODE" and before.rids
        follows = after.mode == "PREFILL" and after.tick <= before.tick + 1
        if emptied and follows and len(finished(scenario, trace, before)) == len(before.rids):
            yield after


@situation("a verify with more requests than the one before it on the rank")
def batch_grows(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (after for before, after in neighbours(verifies(trace)) if len(after.rids) > len(before.rids))


@situation("a verify with fewer requests than the one before it on the rank")
def batch_shrinks(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (after for before, after in neighbours(verifies(trace)) if len(after.rids) < len(before.rids))


@situation("requests wait although there is memory, because as many run as the limit allows")
def running_limit_reached(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    limit = scenario.engine.running_limit or scenario.engine.max_running
    at = {record.tick: record for record in verifies(trace)}
    for event in trace.events:
        if event.name == "turn" and event.data.get("waiting") and len(event.data.get("running", ())) >= limit:
            yield at.get(event.tick)


@situation("a batch that is neither idle nor has a request")
def empty_batch(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record in leading_rounds(trace) if not record.rids and record.mode != "IDLE")


@situation("a loop turn before the last batch in which no rank ran one")
def idle_tick(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    busy = {record.tick for record in trace.rounds}
    yield from (None for _ in range(max(busy, default=-1) + 1 - len(busy)))


# Acceptance


def _accept_length(length: int) -> None:
    def find(scenario: Scenario, trace: Trace) -> Iterator[Place]:
        yield from (part for part in verify_parts(trace) if part.length == length)

    find.__name__ = f"accept_len_{length}"
    situation(f"a request that committed {length} token{'s' if length > 1 else ''} in one verify")(find)


for _length in range(1, LONGEST_ACCEPT + 1):
    _accept_length(_length)


@situation("every accept length from 1 to k+1 (counts the rarest)")
def every_accept_len_seen(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    parts = list(verify_parts(trace))
    by_length = [[part for part in parts if part.length == length] for length in range(1, scenario.spec.k + 2)]
    yield from min(by_length, key=len)


@situation("one request rejected everything and another accepted everything in one batch")
def accept_len_1_and_full_in_one_batch(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record in verifies(trace) if {1, scenario.spec.k + 1} <= set(record.lens))


@situation("a verify of a request that may generate only one more token")
def one_token_left(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    limits = {request.rid: len(request.prompt) + request.max_new_tokens for request in scenario.requests}
    yield from (part for part in verify_parts(trace) if limits.get(part.rid) == part.start + 2)


@situation("a stop token with accepted tokens after it in the same verify")
def stop_inside_accepted_run(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    stopped = {end.rid: last_output(scenario, end) for end in trace.ends if end.reason == "stop"}
    for part in verify_parts(trace):
        if part.start + 1 <= stopped.get(part.rid, -1) < part.start + part.length:
            yield part


@situation("a round whose draft and verify rows lie on both sides of a page border")
def page_border_in_draft(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    page, k = scenario.engine.page, scenario.spec.k
    if page > 1:
        yield from (part for part in verify_parts(trace) if part.start // page != (part.start + k) // page)
