"""Names for the situations that bugs hide in, each with a predicate that counts how often a trace shows it.

The generator asks for situations by name (`Scenario.wants`), the verdict counts them on the engine trace: a situation
that was asked for and never happened makes the verdict UNKNOWN. This module must not judge rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.batches import Part, leading_rounds, parts_of
from harness.trace import RequestEnd, RoundRecord, Trace
from harness.types import Scenario

Count = Callable[[Scenario, Trace], int]

#: k is at most 16, so an accept length is at most 17.
LONGEST_ACCEPT = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A name, what it means, and how many times it happened on a trace."""

    name: str
    meaning: str
    count: Count


SITUATIONS: dict[str, Situation] = {}


def coverage(scenario: Scenario, trace: Trace) -> dict[str, int]:
    """Situation -> times it happened; accept lengths beyond k+1 are left out."""
    beyond = {f"accept_len_{length}" for length in range(scenario.spec.k + 2, LONGEST_ACCEPT + 1)}
    return {name: found.count(scenario, trace) for name, found in SITUATIONS.items() if name not in beyond}


def _situation(meaning: str) -> Callable[[Count], Count]:
    """Decorator: the function's name is the situation's name."""

    def keep(count: Count) -> Count:
        name = count.__name__
        if name in SITUATIONS:
            raise ValueError(f"situation {name!r} is defined twice")
        SITUATIONS[name] = Situation(name=name, meaning=meaning, count=count)
        return count

    return keep


# What a trace says, in the words the predicates below use.


def _chunks(trace: Trace) -> Iterator[list[Part]]:
    """The prefill parts of each (rid, epoch), in order; only where there are any."""
    for parts in parts_of(trace).values():
        chunks = [part for part in parts if part.record.mode == "PREFILL"]
        if chunks:
            yield chunks


def _verifies(trace: Trace) -> list[RoundRecord]:
    return [record for record in leading_rounds(trace) if record.mode == "DECODE" and record.rids]


def _last_output(scenario: Scenario, end: RequestEnd) -> int:
    """Index, in the request's text, of its last output token."""
    return len(scenario.request(end.rid).prompt) + len(end.output_ids) - 1


def _finished(scenario: Scenario, trace: Trace, record: RoundRecord) -> list[str]:
    """Requests whose last output token this verify committed; independent of when the loop noticed."""
    ends = {end.rid: end for end in trace.ends if end.reason != "abort"}
    entries = zip(record.rids, record.starts, record.lens, strict=True)
    return [
        rid
        for rid, start, length in entries
        if rid in ends and start + 1 <= _last_output(scenario, ends[rid]) <= start + length
    ]


def _neighbours(records: list[RoundRecord]) -> Iterator[tuple[RoundRecord, RoundRecord]]:
    """Consecutive batches of one rank."""
    before: dict[int, RoundRecord] = {}
    for record in records:
        if record.dp_rank in before:
            yield before[record.dp_rank], record
        before[record.dp_rank] = record


def _aborted(trace: Trace) -> list[RequestEnd]:
    return [end for end in trace.ends if end.reason == "abort"]


def _parts_of_request(trace: Trace, rid: str) -> list[Part]:
    return [part for (name, _), parts in parts_of(trace).items() if name == rid for part in parts]


# Prefill


@_situation("a prefill chunk that does not end its prompt")
def non_final_chunk(scenario: Scenario, trace: Trace) -> int:
    return sum(not part.final for chunks in _chunks(trace) for part in chunks)


@_situation("a prompt no longer than the chunk size, split because others had used up the batch's budget")
def split_by_shared_budget(scenario: Scenario, trace: Trace) -> int:
    chunk = scenario.engine.chunk
    if chunk is None:
        return 0
    return sum(len(parts) > 1 and sum(part.length for part in parts) <= chunk for parts in _chunks(trace))


@_situation("a prompt whose last chunk is a single token")
def chunk_longer_by_one(scenario: Scenario, trace: Trace) -> int:
    return sum(len(parts) > 1 and parts[-1].final and parts[-1].length == 1 for parts in _chunks(trace))


@_situation("a prompt that fills its last chunk exactly")
def chunk_exact_multiple(scenario: Scenario, trace: Trace) -> int:
    return sum(parts[-1].final and parts[-1].length == scenario.engine.chunk for parts in _chunks(trace))


@_situation("a request that started from a cached prefix")
def prefix_hit(scenario: Scenario, trace: Trace) -> int:
    return sum(parts[0].start > 0 for parts in _chunks(trace))


@_situation("prefill and decode in one batch")
def mixed_batch(scenario: Scenario, trace: Trace) -> int:
    return sum(
        record.mode == "MIXED" or bool(record.forwards.get("PREFILL") and record.forwards.get("VERIFY"))
        for record in leading_rounds(trace)
    )


# Batches


@_situation("every request of a batch finished in the same verify")
def all_finished_in_one_verify(scenario: Scenario, trace: Trace) -> int:
    return sum(len(_finished(scenario, trace, record)) == len(record.rids) for record in _verifies(trace))


@_situation("some but not all requests of a batch finished in one verify")
def some_finished(scenario: Scenario, trace: Trace) -> int:
    return sum(0 < len(_finished(scenario, trace, record)) < len(record.rids) for record in _verifies(trace))


@_situation("every request finished in one verify and the rank's next batch prefills a new one")
def all_finished_with_arrival(scenario: Scenario, trace: Trace) -> int:
    return sum(
        before.mode == "DECODE"
        and bool(before.rids)
        and len(_finished(scenario, trace, before)) == len(before.rids)
        and after.mode == "PREFILL"
        and after.tick <= before.tick + 1
        for before, after in _neighbours(leading_rounds(trace))
    )


@_situation("a verify with more requests than the one before it on the rank")
def batch_grows(scenario: Scenario, trace: Trace) -> int:
    return sum(len(after.rids) > len(before.rids) for before, after in _neighbours(_verifies(trace)))


@_situation("a verify with fewer requests than the one before it on the rank")
def batch_shrinks(scenario: Scenario, trace: Trace) -> int:
    return sum(len(after.rids) < len(before.rids) for before, after in _neighbours(_verifies(trace)))


@_situation("a batch that is neither idle nor has a request")
def empty_batch(scenario: Scenario, trace: Trace) -> int:
    return sum(not record.rids and record.mode != "IDLE" for record in leading_rounds(trace))


@_situation("a loop turn before the last batch in which no rank ran one")
def idle_tick(scenario: Scenario, trace: Trace) -> int:
    busy = {record.tick for record in trace.rounds}
    return max(busy, default=-1) + 1 - len(busy)


@_situation("a rank without requests that enters a batch because another rank has some")
def idle_rank(scenario: Scenario, trace: Trace) -> int:
    busy = {record.tick for record in trace.rounds if record.mode != "IDLE"}
    return sum(record.mode == "IDLE" and record.tick in busy for record in leading_rounds(trace))


# Acceptance


def _accept_length(length: int) -> None:
    def count(scenario: Scenario, trace: Trace) -> int:
        return sum(record.lens.count(length) for record in _verifies(trace))

    count.__name__ = f"accept_len_{length}"
    _situation(f"a request that committed {length} token{'s' if length > 1 else ''} in one verify")(count)


for _length in range(1, LONGEST_ACCEPT + 1):
    _accept_length(_length)


@_situation("every accept length from 1 to k+1 (counts the rarest)")
def every_accept_len_seen(scenario: Scenario, trace: Trace) -> int:
    lengths = [length for record in _verifies(trace) for length in record.lens]
    return min(lengths.count(length) for length in range(1, scenario.spec.k + 2))


@_situation("one request rejected everything and another accepted everything in one batch")
def accept_len_1_and_full_in_one_batch(scenario: Scenario, trace: Trace) -> int:
    return sum({1, scenario.spec.k + 1} <= set(record.lens) for record in _verifies(trace))


@_situation("a verify of a request that may generate only one more token")
def one_token_left(scenario: Scenario, trace: Trace) -> int:
    limits = {request.rid: len(request.prompt) + request.max_new_tokens for request in scenario.requests}
    return sum(
        limits.get(rid) == start + 2
        for record in _verifies(trace)
        for rid, start in zip(record.rids, record.starts, strict=True)
    )


@_situation("a stop token with accepted tokens after it in the same verify")
def stop_inside_accepted_run(scenario: Scenario, trace: Trace) -> int:
    stopped = {end.rid: _last_output(scenario, end) for end in trace.ends if end.reason == "stop"}
    return sum(
        start + 1 <= stopped.get(rid, -1) < start + length
        for record in _verifies(trace)
        for rid, start, length in zip(record.rids, record.starts, record.lens, strict=True)
    )


@_situation("a round whose draft and verify rows lie on both sides of a page border")
def page_border_in_draft(scenario: Scenario, trace: Trace) -> int:
    page, k = scenario.engine.page, scenario.spec.k
    if page == 1:
        return 0
    return sum(start // page != (start + k) // page for record in _verifies(trace) for start in record.starts)


# Leaving and coming back


@_situation("a request aborted before its prompt was prefilled to the end")
def abort_in_chunk(scenario: Scenario, trace: Trace) -> int:
    return sum(
        bool(parts := _parts_of_request(trace, end.rid))
        and not any(p.final or p.record.mode == "DECODE" for p in parts)
        for end in _aborted(trace)
    )


@_situation("a request aborted after its prompt was prefilled")
def abort_in_decode(scenario: Scenario, trace: Trace) -> int:
    return sum(
        any(part.final or part.record.mode == "DECODE" for part in _parts_of_request(trace, end.rid))
        for end in _aborted(trace)
    )


@_situation("the only live request aborted")
def abort_last_live(scenario: Scenario, trace: Trace) -> int:
    ticks: dict[str, list[int]] = {}
    for record in leading_rounds(trace):
        for rid in record.rids:
            ticks.setdefault(rid, []).append(record.tick)
    asked = {str(event.data.get("rid")): event.tick for event in trace.events if event.name == "abort"}

    def live(rid: str, tick: int) -> bool:
        return ticks[rid][0] < tick <= ticks[rid][-1]

    return sum(
        end.rid in ticks and not any(live(rid, asked.get(end.rid, end.tick)) for rid in ticks if rid != end.rid)
        for end in _aborted(trace)
    )


@_situation("a request that was retracted and came back")
def retract_resume(scenario: Scenario, trace: Trace) -> int:
    return sum(epoch > 0 for _, epoch in parts_of(trace))


@_situation("the pool ran out, so the engine itself sent a request back to the queue")
def pool_exhausted(scenario: Scenario, trace: Trace) -> int:
    """Restarts that nobody asked for."""
    if any(op.kind == "retract" or op.kind == "pause" for op in scenario.script):
        return sum(event.name == "retract" and event.data.get("reason") == "pool" for event in trace.events)
    return retract_resume(scenario, trace)


@_situation("a request that ended because the context window was full")
def context_limit(scenario: Scenario, trace: Trace) -> int:
    limits = {request.rid: request.max_new_tokens for request in scenario.requests}
    return sum(end.reason == "length" and len(end.output_ids) < limits.get(end.rid, 0) for end in trace.ends)
