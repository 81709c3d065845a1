"""Coverage points of a hand-over between a prefill engine and a decode engine. See `harness/coverage`.

A PREBUILT batch is what the decode side makes of requests whose prompts ran elsewhere. "In transit" is what a side has
in its queues of hand-overs: waiting for the other side, for memory, or for the transfer itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from harness.contract.batches import parts_of
from harness.contract.scenario import Scenario
from harness.contract.trace import Event, RoundRecord, Trace
from harness.coverage.points import Place, Where, chunks_of, coverage_point, running_after


def _prebuilt(trace: Trace) -> list[RoundRecord]:
    return [record for record in trace.rounds if record.mode == "PREBUILT" and record.rids]


def _arrived(trace: Trace) -> dict[str, RoundRecord]:
    """rid -> the batch in which it was first handed over."""
    found: dict[str, RoundRecord] = {}
    for record in _prebuilt(trace):
        for rid in record.rids:
            found.setdefault(rid, record)
    return found


def _steps(trace: Trace) -> list[Event]:
    """The decode side after each step; of several ranks all that they hold."""
    found: dict[int, Event] = {}
    for event in trace.named("turn"):
        if event.data.get("side") == "decode":
            before = found.get(event.scheduler_step)
            found[event.scheduler_step] = (
                event if before is None else replace(before, data=_both(before.data, event.data))
            )
    return list(found.values())


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: [*one[name], *other[name]] if isinstance(found, list) else found for name, found in one.items()}


def _scripted(trace: Trace, what: str) -> dict[str, int]:
    """rid -> scheduler step at which the scenario said this of its transfer."""
    events = [event for event in trace.named("transfer") if event.data.get("what") == what]
    return {str(event.data["rid"]): event.scheduler_step for event in events}


def _in_transit(step: Event) -> set[str]:
    return {*step.data.get("moving", ()), *step.data.get("waiting", ())}


def _before(trace: Trace) -> dict[int, Event]:
    """scheduler step -> the decode side after the step before it."""
    return {after.scheduler_step: before for before, after in pairwise(_steps(trace))}


@coverage_point("one request handed over by itself", where=Where.HANDOFF)
def handed_over(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record in _prebuilt(trace) if len(record.rids) == 1)


@coverage_point("several requests handed over in one scheduler step", where=Where.HANDOFF)
def handed_over_together(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record in _prebuilt(trace) if len(record.rids) > 1)


@coverage_point("a request handed over whose prompt ended in a chunk of one token", where=Where.HANDOFF)
def last_chunk_of_one(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    arrived = _arrived(trace)
    for chunks in chunks_of(trace):
        last = chunks[-1]
        if len(chunks) > 1 and last.final and last.length == 1 and last.rid in arrived and last.record.side:
            yield last


@coverage_point("a request handed over to a decode side without requests", where=Where.HANDOFF)
def handed_over_to_idle_side(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    before = _before(trace)
    for record in _prebuilt(trace):
        if record.scheduler_step not in before or not before[record.scheduler_step].data["running"]:
            yield record


@coverage_point("a request handed over to a decode side in the middle of other requests", where=Where.HANDOFF)
def handed_over_to_busy_side(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    before = _before(trace)
    yield from (
        one for one in _prebuilt(trace) if one.scheduler_step in before and before[one.scheduler_step].data["running"]
    )


@coverage_point("a request whose KV has arrived waits because the decode side is full", where=Where.HANDOFF)
def decode_side_full(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for step in _steps(trace):
        if step.data["waiting"] and len(step.data["running"]) >= scenario.engine.max_running_requests:
            yield None


@coverage_point("a request that finishes with the token it is handed over with", where=Where.HANDOFF)
def finished_at_hand_over(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    ones = _of_one_token(trace)
    yield from (record for record in _prebuilt(trace) for rid in record.rids if rid in ones)


@coverage_point(
    "every request of a prebuilt batch finishes with the token it is handed over with: none is left",
    where=Where.HANDOFF,
)
def prebuilt_all_finished(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    ones = _of_one_token(trace)
    yield from (record for record in _prebuilt(trace) if set(record.rids) <= ones)


def _of_one_token(trace: Trace) -> set[str]:
    return {end.rid for end in trace.ends if len(end.output_ids) == 1 and end.reason in ("length", "stop")}


@coverage_point("an abort of a request that is in transit", where=Where.HANDOFF)
def abort_in_transfer(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    arrived, before = _arrived(trace), _before(trace)
    for event in trace.named("abort"):
        if event.scheduler_step in before and event.data["rid"] not in arrived:
            yield from (None for _ in range(event.data["rid"] in before[event.scheduler_step].data.get("moving", ())))


@coverage_point("a transfer that fails", where=Where.HANDOFF)
def failed_transfer(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    arrived = _arrived(trace)
    yield from (None for rid in _scripted(trace, "fail") if rid not in arrived)


@coverage_point("a transfer that fails while another one in transit beside it arrives", where=Where.HANDOFF)
def failed_beside_good(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    arrived, steps = _arrived(trace), _steps(trace)
    for rid in _scripted(trace, "fail"):
        beside = [step for step in steps if rid in step.data.get("moving", ())]
        others = {other for step in beside for other in step.data["moving"]} - {rid}
        if rid not in arrived and others & set(arrived):
            yield arrived[min(others & set(arrived))]


@coverage_point("a transfer that the prefill side is done with and that never arrives", where=Where.HANDOFF)
def dropped_transfer(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    arrived = _arrived(trace)
    chunks = {parts[-1].rid for parts in chunks_of(trace) if parts[-1].final}
    yield from (None for rid in _scripted(trace, "drop") if rid in chunks and rid not in arrived)


@coverage_point("what was sent of an aborted request lands in its old place after the abort", where=Where.HANDOFF)
def late_write(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    aborts = {event.data["rid"]: event.scheduler_step for event in trace.named("abort")}
    landed = _scripted(trace, "land")
    yield from (None for rid, step in landed.items() if rid in aborts and aborts[rid] <= step)


@coverage_point("a transfer that arrives steps after its prompt has run", where=Where.HANDOFF)
def delayed_transfer(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    held, arrived = _scripted(trace, "hold"), _arrived(trace)
    for rid in held:
        ran = [
            part.record.scheduler_step for parts in chunks_of(trace) for part in parts if part.rid == rid and part.final
        ]
        if rid in arrived and ran and arrived[rid].scheduler_step > ran[-1]:
            yield arrived[rid]


@coverage_point("two transfers that arrive in another order than their prompts ran in", where=Where.HANDOFF)
def reordered_transfers(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    arrived = _arrived(trace)
    ran = [parts[-1] for parts in chunks_of(trace) if parts[-1].final and parts[-1].rid in arrived]
    ran.sort(key=lambda part: (part.record.index, part.record.rids.index(part.rid)))
    for first, second in pairwise(ran):
        if arrived[first.rid].index > arrived[second.rid].index:
            yield arrived[first.rid]


@coverage_point(
    "a step in which all requests in transit were lost to aborts or failures: a prebuilt batch of none",
    where=Where.HANDOFF,
)
def empty_prebuilt_batch(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (None for _ in _emptied(trace))


@coverage_point("a running request that the decode side took back and handed over to itself again", where=Where.HANDOFF)
def retracted_on_decode_side(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for parts in parts_of(trace).values():
        yield from (part for part in parts if part.record.mode == "PREBUILT" and part.attempt > 0)


@coverage_point("a request handed over whose first tokens the decode side had already", where=Where.HANDOFF)
def prefix_on_decode_side(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    records = {record.index: record for record in _prebuilt(trace)}
    for event in trace.named("handed"):
        if any(event.data["prefixes"]):
            yield records.get(int(event.data["round"]))


def _others(trace: Trace, record: RoundRecord) -> list[set[str]]:
    """What the other ranks of the decode side were running before that batch."""
    return [
        held
        for (scheduler_step, rank), held in running_after(trace, "decode").items()
        if scheduler_step == record.scheduler_step - 1 and rank != record.dp_rank
    ]


@coverage_point("a request handed over to one rank while another one has no requests", where=Where.HANDOFF_RANKS)
def handed_over_beside_idle_rank(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    together = {(record.scheduler_step, record.dp_rank) for record in _prebuilt(trace)}
    for record in _prebuilt(trace):
        alone = not any(
            scheduler_step == record.scheduler_step and rank != record.dp_rank for scheduler_step, rank in together
        )
        if alone and any(not held for held in _others(trace, record)):
            yield record


@coverage_point("a request handed over to one rank while another one decodes", where=Where.HANDOFF_RANKS)
def handed_over_beside_busy_rank(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record in _prebuilt(trace) if any(_others(trace, record)))


@coverage_point("requests handed over to several ranks in one scheduler step", where=Where.HANDOFF_RANKS)
def handed_over_on_each_rank(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    scheduler_steps: dict[int, set[int]] = {}
    for record in _prebuilt(trace):
        scheduler_steps.setdefault(record.scheduler_step, set()).add(record.dp_rank)
    yield from (
        record for record in _prebuilt(trace) if record.dp_rank and len(scheduler_steps[record.scheduler_step]) > 1
    )


@coverage_point(
    "a rank whose requests in transit were all lost in one step, while another rank decodes", where=Where.HANDOFF_RANKS
)
def empty_prebuilt_beside_busy_rank(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    if scenario.engine.dp_size < 2:
        return
    held = running_after(trace, "decode")
    yield from (
        None
        for scheduler_step in _emptied(trace)
        if any(held.get((scheduler_step, rank)) for rank in range(scenario.engine.dp_size))
    )


def _emptied(trace: Trace) -> list[int]:
    """Scheduler steps in which everything in transit was lost."""
    built = {record.scheduler_step for record in _prebuilt(trace)}
    steps = pairwise(_steps(trace))
    return [
        b.scheduler_step for a, b in steps if _in_transit(a) and not _in_transit(b) and b.scheduler_step not in built
    ]
