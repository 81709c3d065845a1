"""Coverage points of decoding: the batch, what a verify accepts, requests that leave and come back.

See `harness/coverage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.contract.admission import reserved
from harness.contract.batches import Part, leading_rounds, parts_of
from harness.contract.scenario import Scenario
from harness.contract.trace import Event, RequestEnd, RoundRecord, Trace
from harness.coverage.points import (
    LONGEST_ACCEPT,
    Place,
    Where,
    aborted,
    coverage_point,
    finished,
    last_output,
    neighbours,
    parts_of_request,
    verifies,
    verify_parts,
)

# The batch


@coverage_point("every request of a batch finished in the same verify")
def all_finished_in_one_verify(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (r for r in verifies(trace) if len(finished(scenario, trace, r)) == len(r.rids))


@coverage_point("some but not all requests of a batch finished in one verify")
def some_finished(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (r for r in verifies(trace) if 0 < len(finished(scenario, trace, r)) < len(r.rids))


@coverage_point("every request finished in one verify and the rank's next batch prefills a new one")
def all_finished_with_arrival(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for before, after in neighbours(leading_rounds(trace)):
        emptied = before.mode == "DECODE" and before.rids
        follows = after.mode == "PREFILL" and after.scheduler_step <= before.scheduler_step + 1
        if emptied and follows and len(finished(scenario, trace, before)) == len(before.rids):
            yield after


@coverage_point("a verify with more requests than the one before it on the rank")
def batch_grows(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (after for before, after in neighbours(verifies(trace)) if len(after.rids) > len(before.rids))


@coverage_point("a verify with fewer requests than the one before it on the rank")
def batch_shrinks(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (after for before, after in neighbours(verifies(trace)) if len(after.rids) < len(before.rids))


@coverage_point("requests of different LoRA adapters, or with and without one, in one verify", where=Where.ADAPTERS)
def adapters_in_one_batch(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (r for r in verifies(trace) if len({scenario.request(rid).lora_path for rid in r.rids}) > 1)


@coverage_point("requests wait although there is memory, because as many run as the limit allows")
def running_limit_reached(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    limit = scenario.engine.running_limit or scenario.engine.max_running_requests
    at = {record.scheduler_step: record for record in verifies(trace)}
    for event in trace.named("turn"):
        if event.data.get("waiting") and len(event.data.get("running", ())) >= limit:
            yield at.get(event.scheduler_step)


@coverage_point("a batch that is neither idle nor has a request", where=Where.ELSEWHERE)
def empty_batch(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record in leading_rounds(trace) if not record.rids and record.mode != "IDLE")


@coverage_point("a loop step before the last batch in which no rank ran one")
def idle_tick(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    busy = {record.scheduler_step for record in trace.rounds}
    yield from (None for _ in range(max(busy, default=-1) + 1 - len(busy)))


# Acceptance


def _accept_length(length: int) -> None:
    def find(scenario: Scenario, trace: Trace) -> Iterator[Place]:
        yield from (part for part in verify_parts(trace) if part.length == length)

    find.__name__ = f"accept_len_{length}"
    coverage_point(f"a request that committed {length} token{'s' if length > 1 else ''} in one verify")(find)


for _length in range(1, LONGEST_ACCEPT + 1):
    _accept_length(_length)


@coverage_point("every accept length from 1 to k+1 (counts the rarest)")
def every_accept_len_seen(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    parts = list(verify_parts(trace))
    by_length = [[part for part in parts if part.length == length] for length in range(1, scenario.spec.most_steps + 2)]
    yield from min(by_length, key=len)


@coverage_point("one request rejected everything and another accepted everything in one batch")
def accept_len_1_and_full_in_one_batch(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for record in verifies(trace):
        steps = scenario.spec.of_round(record.num_steps).num_steps
        yield from [record] if steps and {1, steps + 1} <= set(record.lens) else []


def _changed(trace: Trace) -> Iterator[tuple[RoundRecord, RoundRecord]]:
    """Decode rounds of another number of steps than the one before, with that one."""
    rounds = [record for record in verifies(trace) if record.num_steps >= 0]
    yield from ((one, two) for one, two in pairwise(rounds) if one.num_steps != two.num_steps)


@coverage_point("a round of more draft steps than the one before, while requests run", where=Where.ADAPTIVE)
def steps_raised(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (two for one, two in _changed(trace) if two.num_steps > one.num_steps and set(one.rids) & set(two.rids))


@coverage_point("a round of fewer draft steps than the one before, while requests run", where=Where.ADAPTIVE)
def steps_lowered(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (two for one, two in _changed(trace) if two.num_steps < one.num_steps and set(one.rids) & set(two.rids))


@coverage_point("a round without draft steps between rounds that speculate, while requests run", where=Where.ADAPTIVE)
def steps_zero_and_back(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (two for one, two in _changed(trace) if not one.num_steps and set(one.rids) & set(two.rids))


@coverage_point("a verify of a request that may generate only one more token")
def one_token_left(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    limits = {request.rid: len(request.input_ids) + request.max_new_tokens for request in scenario.requests}
    yield from (part for part in verify_parts(trace) if limits.get(part.rid) == part.start + 2)


@coverage_point("a stop token with accepted tokens after it in the same verify")
def stop_inside_accepted_run(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    stopped = {end.rid: last_output(scenario, end) for end in trace.ends if end.reason == "stop"}
    for part in verify_parts(trace):
        if part.start + 1 <= stopped.get(part.rid, -1) < part.start + part.length:
            yield part


@coverage_point("a round whose draft and verify rows lie on both sides of a page border")
def page_border_in_draft(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    page = scenario.engine.page_size
    for part in verify_parts(trace) if page > 1 else ():
        if part.start // page != (part.start + part.spec(scenario.spec).num_steps) // page:
            yield part


# Leaving: aborts, preemption


def _before_abort(trace: Trace) -> Iterator[list[Part]]:
    """What each aborted request had done when the abort was asked for; releases differ in how soon they act on it."""
    asked = {str(event.data.get("rid")): event.scheduler_step for event in trace.named("abort")}
    for end in aborted(trace):
        parts = parts_of_request(trace, end.rid)
        yield [
            part for part in parts if part.record.scheduler_step < asked.get(end.rid, part.record.scheduler_step + 1)
        ]


@coverage_point("a request aborted while it waited, before any of its prompt was prefilled")
def abort_before_prefill(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (None for parts in _before_abort(trace) if not parts)


def _prefilled(parts: list[Part]) -> bool:
    return any(part.final or part.record.mode == "DECODE" for part in parts)


@coverage_point("a request aborted before its prompt was prefilled to the end")
def abort_in_chunk(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (parts[-1] for parts in _before_abort(trace) if parts and not _prefilled(parts))


@coverage_point("a request aborted after its prompt was prefilled")
def abort_in_decode(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (parts[-1] for parts in _before_abort(trace) if _prefilled(parts))


@coverage_point("the only live request aborted")
def abort_last_live(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    scheduler_steps: dict[str, list[int]] = {}
    for record in leading_rounds(trace):
        for rid in record.rids:
            scheduler_steps.setdefault(rid, []).append(record.scheduler_step)
    asked = {str(event.data.get("rid")): event.scheduler_step for event in trace.named("abort")}

    def alone(end: RequestEnd) -> bool:
        scheduler_step = asked.get(end.rid, end.scheduler_step)
        return not any(
            scheduler_steps[rid][0] < scheduler_step <= scheduler_steps[rid][-1]
            for rid in scheduler_steps
            if rid != end.rid
        )

    for end in aborted(trace):
        if end.rid in scheduler_steps and alone(end):
            yield parts_of_request(trace, end.rid)[-1]


@coverage_point("a running request sent back to wait because one of higher priority came")
def preempted(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    rank = {request.rid: request.priority or 0 for request in scenario.requests}
    scripted = {event.scheduler_step for event in trace.named("retract", "abort")}
    prefills = {record.scheduler_step: record for record in leading_rounds(trace) if record.mode == "PREFILL"}
    running: set[str] = set()
    for event in trace.named("turn"):
        back = running & set(event.data.get("waiting", ()))
        came = prefills.get(event.scheduler_step)
        if back and came and event.scheduler_step not in scripted:
            lowest = min(rank[rid] for rid in back)
            yield from (came for _ in range(any(rank[rid] > lowest for rid in came.rids)))
        running = set(event.data.get("running", ()))


@coverage_point("a request aborted while others of its batch went on decoding")
def abort_of_some(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    gone = {end.rid for end in aborted(trace)}
    for before, after in neighbours(verifies(trace)):
        if gone & set(before.rids) - set(after.rids) and set(before.rids) & set(after.rids):
            yield after


# Coming back


@coverage_point("a request that was retracted and came back")
def retract_resume(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (parts[0] for (_, attempt), parts in parts_of(trace).items() if attempt > 0)


def _borders(parts: list[Part]) -> Iterator[tuple[Part, int]]:
    """Where the prefill of a request that came back starts or is cut, with the part that lies behind the border."""
    for part in parts:
        if part.record.mode == "PREFILL" and part.start > 0:
            yield part, part.start


def _taken_back(trace: Trace) -> Iterator[Event]:
    """Retractions of part of a batch, which the engine tells of when they happen."""
    yield from (event for event in trace.named("retract") if event.data.get("rids"))


@coverage_point("some requests of a batch were taken back while the others of it went on decoding")
def partial_retraction(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    at = {(record.scheduler_step, record.dp_rank): record for record in verifies(trace)}
    for event in _taken_back(trace):
        beside = at.get((event.scheduler_step, event.dp_rank))
        if beside is not None and not set(event.data["rids"]) & set(beside.rids):
            yield beside


@coverage_point("a batch whose requests stand in another order than in the verify before")
def batch_reordered(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for before, after in neighbours(verifies(trace)):
        stayed = [rid for rid in before.rids if rid in after.rids]
        if stayed != [rid for rid in after.rids if rid in before.rids]:
            yield after


@coverage_point("a request came back, and its cached prefix or a chunk of it ends inside the prompt")
def retract_border_in_prompt(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for (rid, attempt), parts in parts_of(trace).items():
        if attempt:
            prompt = len(scenario.request(rid).input_ids)
            yield from (part for part, border in _borders(parts) if border < prompt)


@coverage_point("a request came back, and its cached prefix or a chunk of it ends inside what it had generated")
def retract_border_in_output(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for (rid, attempt), parts in parts_of(trace).items():
        if attempt:
            prompt = len(scenario.request(rid).input_ids)
            yield from (part for part, border in _borders(parts) if border > prompt)


@coverage_point("requests held in the middle of their generation by a pause, and let go on")
def pause_resume(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    pauses = [event.scheduler_step for event in trace.named("pause")]
    for parts in parts_of(trace).values():
        scheduler_steps = [part.record.scheduler_step for part in parts]
        for pause in pauses:
            after = [part for part in parts if part.record.scheduler_step >= pause]
            if scheduler_steps[0] < pause and after:
                yield after[0]


@coverage_point("a prompt held by a pause after a part of it was read")
def pause_in_chunk(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    pauses = [event.scheduler_step for event in trace.named("pause")]
    for parts in parts_of(trace).values():
        for before, after in pairwise(parts):
            held = any(before.record.scheduler_step < pause <= after.record.scheduler_step for pause in pauses)
            if held and before.record.mode == "PREFILL" and not before.final:
                yield after


@coverage_point("the pool ran out, so the engine itself sent a request back to the queue")
def pool_exhausted(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    """As the engine tells; older traces do not, and there it is a restart that nobody asked for."""
    told = [event for event in _taken_back(trace) if event.data.get("reason") == "pool"]
    asked = scenario.engine.priority_scheduling or any(op.kind in ("retract", "pause") for op in scenario.script)
    yield from (None for _ in told)
    if not told and not asked:
        yield from retract_resume(scenario, trace)


@coverage_point("a request that filled the context window as far as SGLang lets one, or was cut by it")
def context_limit(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    context = int(trace.header.get("context_length", scenario.engine.context_length))
    room = context - reserved(scenario.spec)
    for end in trace.ends:
        cut = len(end.output_ids) < scenario.request(end.rid).max_new_tokens
        if end.reason == "length" and (cut or last_output(scenario, end) + 1 >= room):
            yield from parts_of_request(trace, end.rid)[-1:]
