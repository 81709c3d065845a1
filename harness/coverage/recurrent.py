"""Coverage points of targets that keep recurrent states. See `harness/coverage`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.contract.batches import Part, parts_of
from harness.contract.scenario import Scenario
from harness.contract.trace import RECURRENT, Trace
from harness.coverage.points import Place, Where, aborted, chunks_of, coverage_point, parts_of_request


def _looked_at(trace: Trace) -> set[tuple[int, int, str]]:
    """(dp_rank, round, rid) of every part whose forward was seen to find a state."""
    events = list(trace.named(RECURRENT))
    return {(event.dp_rank, event.data["round"], rid) for event in events for rid in event.data["rids"]}


def _place(part: Part) -> tuple[int, int, str]:
    return part.record.dp_rank, part.record.index, part.rid


@coverage_point("a verify that continues from the states of one that refused a proposal", where=Where.RECURRENT)
def state_behind_refused(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    """What that one computed behind the refused token must be gone."""
    seen, whole = _looked_at(trace), scenario.spec.num_steps + 1
    for parts in parts_of(trace).values():
        for before, part in pairwise(parts):
            decoding = before.record.mode == part.record.mode == "DECODE"
            if decoding and 0 < before.length < whole and _place(part) in seen:
                yield part


@coverage_point("a chunk of a prompt that continues from the states of the one before", where=Where.RECURRENT)
def state_behind_chunk(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    seen = _looked_at(trace)
    for chunks in chunks_of(trace):
        yield from (part for part in chunks[1:] if _place(part) in seen)


@coverage_point("a request that starts from states in the prefix cache", where=Where.RECURRENT)
def state_from_cache(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    seen = _looked_at(trace)
    yield from (chunks[0] for chunks in chunks_of(trace) if chunks[0].start and _place(chunks[0]) in seen)


@coverage_point("a verify of a request that was taken back and has come back to its states", where=Where.RECURRENT)
def state_after_retraction(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    seen = _looked_at(trace)
    for (_, attempt), parts in parts_of(trace).items():
        verifies = [part for part in parts if part.record.mode == "DECODE" and _place(part) in seen]
        yield from verifies[: attempt > 0]


@coverage_point(
    "states found behind a verify whose request was aborted, by one beside it or the next", where=Where.RECURRENT
)
def state_behind_abort(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    """Whoever gets the slot of the aborted one must not find what that one left."""
    seen, every = _looked_at(trace), parts_of(trace)
    for end in aborted(trace):
        own = parts_of_request(trace, end.rid)
        if own and own[-1].record.mode == "DECODE":
            after = (part for parts in every.values() for part in parts if part.rid != end.rid and _place(part) in seen)
            last = own[-1].record
            yield from [
                part for part in after if part.record.dp_rank == last.dp_rank and part.record.index > last.index
            ][:1]
