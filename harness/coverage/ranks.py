"""Coverage points of DP ranks that run in step. See `harness/coverage`.

An idle rank takes part in a batch because another rank has one. Unless it was told to (dp_spec_prefill_coordination),
SGLang never lets one rank prefill beside another's verify while it speculates: the rank that could verify is held idle
for that batch, with its requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.contract.batches import leading_rounds
from harness.contract.scenario import Scenario
from harness.contract.trace import RoundRecord, Trace
from harness.coverage.points import Place, Where, coverage_point, finished, last_output, running_after


def _scheduler_steps(trace: Trace) -> dict[int, dict[int, RoundRecord]]:
    """scheduler step -> DP rank -> its batch, in order of time."""
    found: dict[int, dict[int, RoundRecord]] = {}
    for record in leading_rounds(trace):
        found.setdefault(record.scheduler_step, {})[record.dp_rank] = record
    return found


def _idle(trace: Trace) -> Iterator[tuple[RoundRecord, list[RoundRecord]]]:
    """Each idle batch with the busy batches of other ranks beside it."""
    for by_rank in _scheduler_steps(trace).values():
        busy = [record for record in by_rank.values() if record.mode != "IDLE"]
        if busy:
            yield from ((record, busy) for record in by_rank.values() if record.mode == "IDLE")


def _busy_scheduler_steps(trace: Trace) -> dict[int, list[RoundRecord]]:
    """DP rank -> its batches with requests, in order of time."""
    found: dict[int, list[RoundRecord]] = {}
    for record in leading_rounds(trace):
        if record.mode != "IDLE":
            found.setdefault(record.dp_rank, []).append(record)
    return found


@coverage_point("a forward whose ranks pad their tokens to those of the fullest one (MAX_LEN)", where=Where.RANKS)
def padded_to_fullest(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from _padded(trace, "MAX_LEN")


@coverage_point("a forward whose ranks gather their tokens one behind another (SUM_LEN)", where=Where.RANKS)
def padded_to_sum(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from _padded(trace, "SUM_LEN")


def _padded(trace: Trace, mode: str) -> Iterator[None]:
    states = trace.named("busy_state", "idle_state")
    yield from (None for event in states if event.data.get("padding") == mode)


@coverage_point("a rank without requests that enters a batch because another rank has some", where=Where.RANKS)
def idle_rank(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record, _ in _idle(trace))


@coverage_point("a rank idle beside others before it ever had a request", where=Where.RANKS)
def idle_from_the_start(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    first = {rank: records[0].scheduler_step for rank, records in _busy_scheduler_steps(trace).items()}
    yield from (
        record
        for record, _ in _idle(trace)
        if record.scheduler_step < first.get(record.dp_rank, record.scheduler_step + 1)
    )


@coverage_point("a rank idle beside others, without requests, between two of its own", where=Where.RANKS)
def idle_between_requests(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    busy, held = _busy_scheduler_steps(trace), running_after(trace)
    for record, _ in _idle(trace):
        own = [one.scheduler_step for one in busy.get(record.dp_rank, ())]
        if own and own[0] < record.scheduler_step < own[-1] and not held.get((record.scheduler_step, record.dp_rank)):
            yield record


def _gone_quiet(scenario: Scenario, trace: Trace) -> Iterator[tuple[RoundRecord, RoundRecord]]:
    """A rank's last batch before it went idle beside others, with its first idle batch after that.

    A batch of which nothing was left is none: under overlap scheduling one is in flight when all requests end.
    """
    outputs = {end.rid: last_output(scenario, end) for end in trace.ends if end.reason != "abort"}
    before: dict[int, RoundRecord] = {}
    for by_rank in _scheduler_steps(trace).values():
        others = any(record.mode != "IDLE" for record in by_rank.values())
        for rank, record in by_rank.items():
            last = before.get(rank)
            if others and record.mode == "IDLE" and last is not None and last.mode != "IDLE":
                yield last, record
            reached = zip(record.rids, record.starts, strict=True)
            if record.mode != "DECODE" or any(start < outputs.get(rid, start + 1) for rid, start in reached):
                before[rank] = record


@coverage_point("a rank idle beside others right after all its requests had finished in one verify", where=Where.RANKS)
def idle_after_all_finished(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for last, record in _gone_quiet(scenario, trace):
        if last.mode == "DECODE" and len(last.rids) > 1 and set(finished(scenario, trace, last)) == set(last.rids):
            yield record


@coverage_point("a rank idle beside another rank's prefill", where=Where.RANKS)
def idle_beside_prefill(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record, busy in _idle(trace) if any(one.mode == "PREFILL" for one in busy))


@coverage_point("a rank idle beside another rank's verify", where=Where.RANKS)
def idle_beside_verify(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record, busy in _idle(trace) if any(one.mode == "DECODE" for one in busy))


@coverage_point("a rank with running requests held idle because another rank prefills", where=Where.RANKS)
def held_idle_by_prefill(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    held = running_after(trace)
    for record, busy in _idle(trace):
        if any(one.mode == "PREFILL" for one in busy) and held.get((record.scheduler_step, record.dp_rank)):
            yield record


@coverage_point("a rank that verifies beside another rank's prefill", where=Where.RANKS)
def verify_beside_prefill(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for by_rank in _scheduler_steps(trace).values():
        if any(record.mode == "PREFILL" for record in by_rank.values()):
            yield from (record for record in by_rank.values() if record.mode == "DECODE")


@coverage_point("a rank idle beside a chunk that does not end another rank's prompt", where=Where.RANKS)
def idle_inside_chunked_prefill(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for record, busy in _idle(trace):
        if any(one.mode == "PREFILL" and not all(one.final) for one in busy):
            yield record


@coverage_point("an abort took a rank's last request while another rank went on", where=Where.RANKS)
def idle_after_abort(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    aborted = {end.rid for end in trace.ends if end.reason == "abort"}
    yield from (record for last, record in _gone_quiet(scenario, trace) if aborted & set(last.rids))


@coverage_point("a step in which no rank had a batch, between two in which one had", where=Where.RANKS)
def every_rank_idle(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    if scenario.engine.dp_size < 2:
        return
    busy = sorted({record.scheduler_step for record in trace.rounds if record.mode != "IDLE"})
    yield from (None for one, other in pairwise(busy) for _ in range(other - one - 1))


@coverage_point("ranks that verify together with different numbers of requests", where=Where.RANKS)
def uneven_ranks(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for by_rank in _scheduler_steps(trace).values():
        sizes = {len(record.rids) for record in by_rank.values() if record.mode == "DECODE"}
        if len(sizes) > 1:
            yield max((one for one in by_rank.values() if one.mode == "DECODE"), key=lambda one: len(one.rids))


def _idle_and_busy(trace: Trace) -> Iterator[tuple[RoundRecord, int, int]]:
    """A step's first busy batch, with how many ranks were idle and how many busy in it."""
    for by_rank in _scheduler_steps(trace).values():
        busy = [record for record in by_rank.values() if record.mode != "IDLE"]
        if busy:
            yield busy[0], len(by_rank) - len(busy), len(busy)


@coverage_point("one rank with a batch and two or more idle beside it", where=Where.MORE_RANKS)
def several_idle_beside_one(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record, idle, busy in _idle_and_busy(trace) if idle > 1 and busy == 1)


@coverage_point("two or more ranks with batches and two or more idle beside them", where=Where.MORE_RANKS)
def several_idle_beside_several(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (record for record, idle, busy in _idle_and_busy(trace) if idle > 1 and busy > 1)
