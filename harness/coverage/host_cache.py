"""Coverage points of a hierarchical cache, whose rows leave the device and come back. See `harness/coverage`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.contract.batches import Part
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.coverage.points import Place, Where, chunks_of, coverage_point


def _loads(trace: Trace) -> Iterator[tuple[list[Part], dict[str, Any]]]:
    """(chunks of a prompt, what was loaded from the host for it) of each request that had rows of any pool loaded.

    Where windows have a pool of their own, theirs may come back to rows that never left the others.
    """
    loaded = {
        (event.dp_rank, event.data["rid"], event.data["round"]): event.data
        for event in trace.named("host")
        if event.data["what"] == "loaded" and (event.data["device"] or event.data.get("windows"))
    }
    for chunks in chunks_of(trace):
        first = chunks[0]
        if (load := loaded.get((first.record.dp_rank, first.rid, first.record.index))) is not None:
            yield chunks, load


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
    yield from (chunks[0] for chunks, load in _loads(trace) if len(load["device"]) < chunks[0].start)


@coverage_point("a request for which rows of sliding windows came from the host", where=Where.HOST)
def host_hit_in_windows(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (chunks[0] for chunks, load in _loads(trace) if load.get("windows"))


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
