"""Coverage points of pools that layers with sliding windows have of their own. See `harness/coverage`."""

from __future__ import annotations

from collections.abc import Iterator

from harness.contract.batches import Part, parts_of
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.coverage.points import Place, Where, chunks_of, coverage_point


def _said(trace: Trace, name: str) -> dict[tuple[int, int, str, int], int]:
    """(dp_rank, round, rid, attempt) -> what event 'window' says of a request's part in a batch."""
    return {
        (event.dp_rank, event.data["round"], rid, attempt): value
        for event in trace.named("window")
        for rid, attempt, value in zip(*(event.data[key] for key in ("rids", "attempts", name)), strict=True)
    }


def _place(part: Part) -> tuple[int, int, str, int]:
    return part.record.dp_rank, part.record.index, part.rid, part.attempt


@coverage_point("a verify of a request some of whose positions have left every window", where=Where.WINDOWS)
def window_evicted(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    """Their slots in the pool of windows were given back; `gone` counts positions, wherever they lie."""
    gone = _said(trace, "gone")
    for parts in parts_of(trace).values():
        yield from (part for part in parts if part.record.mode == "DECODE" and gone.get(_place(part), 0))


@coverage_point("a chunk of a prompt some of whose positions left every window while it was read", where=Where.WINDOWS)
def window_evicted_in_prompt(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    gone = _said(trace, "gone")
    for chunks in chunks_of(trace):
        yield from (part for part in chunks[1:] if gone.get(_place(part), 0) > gone.get(_place(chunks[0]), 0))


@coverage_point("a request that started from a cached prefix as long as a window, or longer", where=Where.WINDOWS)
def prefix_hit_past_window(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    windows = {event.data["window"] for event in trace.named("window")}
    yield from (parts[0] for parts in chunks_of(trace) if windows and parts[0].start >= max(windows))
