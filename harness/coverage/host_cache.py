"""Coverage points of a hierarchical cache, whose rows leave the device and come back. See `harness/coverage`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.contract.batches import Part
from harness.contract.scenario import Scenario
from harness.contract.trace import Event, Trace
from harness.coverage.points import Place, Where, chunks_of, coverage_point


def _all(event: Event) -> int:
    return len(event.data["device"])


def _loads(trace: Trace, rows_of: Callable[[Event], int] = _all) -> Iterator[tuple[list[Part], int]]:
    """(chunks of a prompt, rows that were loaded from the host for it) of each request that had some loaded."""
    loaded = {
        (event.dp_rank, event.data["rid"], event.data["round"]): rows_of(event)
        for event in trace.named("host")
        if event.data["what"] == "loaded"
    }
    for chunks in chunks_of(trace):
        first = chunks[0]
        if rows := loaded.get((first.record.dp_rank, first.rid, first.record.index), 0):
            yield chunks, rows


@coverage_point("rows of the KV cache were copied to the host", where=Where.HOST)
def host_written_back(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (None for event in trace.named("host") if event.data["what"] == "stored")


@coverage_point("a request that started from rows that were loaded from the host", where=Where.HOST)
def host_hit(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (chunks[0] for chunks, _ in _loads(trace))


@coverage_point("the same, and its prompt was read in several chunks behind them", where=Where.HOST)
def host_hit_in_chunks(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (chunks[0] for chunks, _ in _loads(trace) if len(chunks) > 1)


@coverage_point("a prefix of which a part was still on the device and the rest came from the host", where=Where.HOST)
def host_hit_in_part(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (chunks[0] for chunks, rows in _loads(trace) if rows < chunks[0].start)


@coverage_point("a request for which rows of sliding windows came from the host", where=Where.HOST)
def host_hit_in_windows(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (chunks[0] for chunks, _ in _loads(trace, lambda event: event.data.get("windows", 0)))


@coverage_point("a request that started from rows of the host that had been read back from storage", where=Where.HOST)
def storage_hit(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    fetched: set[tuple[int, int]] = set()
    loads: set[tuple[int, str, int]] = set()
    for event in sorted(trace.named("host"), key=lambda one: one.data["round"]):
        rows = {(event.dp_rank, row) for row in event.data["host"]}
        if event.data["what"] == "fetched":
            fetched |= rows
        elif event.data["what"] == "stored":
            fetched -= rows
        elif event.data["what"] == "loaded" and fetched & rows:
            loads.add((event.dp_rank, event.data["rid"], event.data["round"]))
    firsts = (chunks[0] for chunks, _ in _loads(trace))
    yield from (one for one in firsts if (one.record.dp_rank, one.rid, one.record.index) in loads)


@coverage_point("a request that was taken back, and whose own rows came from the host", where=Where.HOST)
def host_hit_retracted(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (chunks[0] for chunks, _ in _loads(trace) if chunks[0].attempt)
