"""Coverage points of prefill: chunks, shared budgets, cached prefixes. See `harness/coverage`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.contract.batches import Part, leading_rounds, parts_of
from harness.contract.scenario import Scenario
from harness.contract.texts import alike
from harness.contract.trace import RoundRecord, Trace
from harness.coverage.points import Place, Where, chunks_of, coverage_point, neighbours, parts_of_request


@coverage_point("a prefill chunk that does not end its prompt")
def non_final_chunk(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (part for chunks in chunks_of(trace) for part in chunks if not part.final)


@coverage_point("a prompt no longer than the chunk size, split because others had used up the batch's budget")
def split_by_shared_budget(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    size = scenario.engine.chunked_prefill_size or 0
    for chunks in chunks_of(trace):
        if len(chunks) > 1 and sum(part.length for part in chunks) <= size:
            yield chunks[0]


@coverage_point("a request's prompt ends and the next request's is cut, in one batch or in two that follow each other")
def chunked_back_to_back(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    firsts = {(p[0].rid, p[0].record.index, p[0].record.dp_rank) for p in chunks_of(trace) if not p[0].final}

    def cut(record: RoundRecord, but: str) -> bool:
        return any((rid, record.index, record.dp_rank) in firsts for rid in record.rids if rid != but)

    after = {(a.dp_rank, a.index): b for a, b in neighbours(leading_rounds(trace))}
    for chunks in chunks_of(trace):
        last = chunks[-1]
        following = after.get((last.record.dp_rank, last.record.index))
        records = [last.record, *([following] if following is not None and following.mode == "PREFILL" else [])]
        if len(chunks) > 1 and last.final and any(cut(record, last.rid) for record in records):
            yield last


@coverage_point("a prompt whose last chunk is a single token")
def chunk_longer_by_one(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (parts[-1] for parts in chunks_of(trace) if len(parts) > 1 and parts[-1].final and parts[-1].length == 1)


@coverage_point("a prompt that fills its last chunk exactly")
def chunk_exact_multiple(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    size = scenario.engine.chunked_prefill_size
    yield from (parts[-1] for parts in chunks_of(trace) if parts[-1].final and parts[-1].length == size)


@coverage_point("prompt tokens that a CUDA graph read, padded or not", where=Where.PREFILL_GRAPHS)
def prompt_in_graph(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (part for chunks in chunks_of(trace) for part in chunks if part.record.graphs.get("PREFILL"))


@coverage_point("a prompt that was read after the engine had been given other weights", where=Where.UPDATED)
def weights_updated(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from _behind(trace, _steps(trace, "update"))


@coverage_point("a prompt that was read after the draft had been given other weights", where=Where.UPDATED)
def draft_updated(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from _behind(trace, _steps(trace, "update", selector=("draft", "all")))


@coverage_point("a request that was taken back for new weights, and went on with them", where=Where.UPDATED)
def updated_while_running(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    steps, parts = _steps(trace, "update"), parts_of(trace)
    for (rid, attempt), own in parts.items():
        before = parts.get((rid, attempt - 1))
        if before and any(before[-1].record.scheduler_step < at <= own[0].record.scheduler_step for at in steps):
            yield own[0]


@coverage_point("a prompt that was read after memory had been released and taken again", where=Where.UPDATED)
def memory_released(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from _behind(trace, _steps(trace, "memory", what=("resume",)))


def _steps(trace: Trace, name: str, **among: tuple[str, ...]) -> list[int]:
    """From which scheduler steps on something that succeeded holds."""
    return [
        event.scheduler_step
        for event in trace.named(name)
        if event.data["success"] and all(event.data.get(key) in among[key] for key in among)
    ]


def _behind(trace: Trace, steps: list[int]) -> Iterator[Place]:
    for chunks in chunks_of(trace):
        if any(step <= chunks[0].record.scheduler_step for step in steps):
            yield chunks[0]


@coverage_point("a request that went on decoding, by one token, in a batch of prompt chunks", where=Where.MIXED)
def mixed_batch(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    for parts in parts_of(trace).values():
        for before, part in pairwise(parts):
            if part.record.mode == "PREFILL" and (before.final or before.record.mode == "DECODE"):
                yield part


# Cached prefixes


@coverage_point("a request that started from a cached prefix")
def prefix_hit(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    yield from (parts[0] for parts in chunks_of(trace) if parts[0].start > 0)


def _branches(scenario: Scenario, trace: Trace) -> Iterator[tuple[Part, int]]:
    """(first part, tokens shared with an earlier prompt) of requests that hit a prefix and then differ from it."""
    began = {rid: parts[0].record.scheduler_step for (rid, attempt), parts in parts_of(trace).items() if attempt == 0}
    for parts in chunks_of(trace):
        first = parts[0]
        if first.start == 0 or first.attempt:
            continue
        own = scenario.request(first.rid).input_ids
        earlier = [
            scenario.request(rid).input_ids
            for rid, scheduler_step in began.items()
            if scheduler_step < first.record.scheduler_step
        ]
        other = max(earlier, key=lambda prompt: alike(own, prompt), default=())
        if alike(own, other) < min(len(own), len(other)):
            yield first, alike(own, other)


def _beside_border(scenario: Scenario, trace: Trace, *, offset: int) -> Iterator[Place]:
    page = scenario.engine.page_size
    if page > 1:
        yield from (part for part, shared in _branches(scenario, trace) if shared % page == offset % page)


@coverage_point("a prefix hit whose shared tokens end at a page border and differ on the next token")
def prefix_ends_at_page_border(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    return _beside_border(scenario, trace, offset=0)


@coverage_point("a prefix hit whose shared tokens end one short of a page border")
def prefix_ends_before_page_border(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    return _beside_border(scenario, trace, offset=-1)


@coverage_point("a prefix hit whose shared tokens end one past a page border")
def prefix_ends_after_page_border(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    return _beside_border(scenario, trace, offset=1)


@coverage_point("the prefix cache was emptied between two batches, and a prompt seen before starts from nothing")
def cache_flushed(scenario: Scenario, trace: Trace) -> Iterator[Place]:
    flushed = [event.scheduler_step for event in trace.named("flush") if event.data.get("flushed")]
    firsts = [parts[0] for request in scenario.requests if (parts := parts_of_request(trace, request.rid))]
    for first in firsts:
        own = scenario.request(first.rid).input_ids
        seen = [
            p.record.scheduler_step for p in firsts if p.rid != first.rid and scenario.request(p.rid).input_ids == own
        ]
        if first.start == 0 and any(
            before < scheduler_step <= first.record.scheduler_step for before in seen for scheduler_step in flushed
        ):
            yield first
