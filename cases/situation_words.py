"""What a situation is, the register of all of them, and the words their predicates are written in.

A predicate names the places on the trace where its situation happened. This module must not judge rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from harness.contract.batches import Part, leading_rounds, parts_of
from harness.contract.trace import RequestEnd, RoundRecord, Trace
from harness.contract.types import Scenario

#: Where a situation happened: a whole batch, one request's part of it, or a moment that ran no rows (None).
Place = RoundRecord | Part | None
Find = Callable[[Scenario, Trace], Iterable[Place]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A name, what it means, and where it happened on a trace: one place each time."""

    name: str
    meaning: str
    find: Find

    def count(self, scenario: Scenario, trace: Trace) -> int:
        """How many times it happened."""
        return sum(1 for _ in self.find(scenario, trace))


SITUATIONS: dict[str, Situation] = {}


def situation(meaning: str) -> Callable[[Find], Find]:
    """Decorator: the function's name is the situation's name."""

    def keep(find: Find) -> Find:
        name = find.__name__
        if name in SITUATIONS:
            raise ValueError(f"situation {name!r} is defined twice")
        SITUATIONS[name] = Situation(name=name, meaning=meaning, find=find)
        return find

    return keep


def chunks_of(trace: Trace) -> Iterator[list[Part]]:
    """The prefill parts of each (rid, epoch), in order; only where there are any."""
    for parts in parts_of(trace).values():
        chunks = [part for part in parts if part.record.mode == "PREFILL"]
        if chunks:
            yield chunks


def verifies(trace: Trace) -> list[RoundRecord]:
    return [record for record in leading_rounds(trace) if record.mode == "DECODE" and record.rids]


def verify_parts(trace: Trace) -> Iterator[Part]:
    """Each request's part in each verify."""
    for parts in parts_of(trace).values():
        yield from (part for part in parts if part.record.mode == "DECODE")


def last_output(scenario: Scenario, end: RequestEnd) -> int:
    """Index, in the request's text, of its last output token."""
    return len(scenario.request(end.rid).prompt) + len(end.output_ids) - 1


def finished(scenario: Scenario, trace: Trace, record: RoundRecord) -> list[str]:
    """Requests whose last output token this verify committed; independent of when the loop noticed."""
    ends = {end.rid: end for end in trace.ends if end.reason != "abort"}
    entries = zip(record.rids, record.starts, record.lens, strict=True)
    return [
        rid
        for rid, start, length in entries
        if rid in ends and start + 1 <= last_output(scenario, ends[rid]) <= start + length
    ]


def neighbours(records: list[RoundRecord]) -> Iterator[tuple[RoundRecord, RoundRecord]]:
    """Consecutive batches of one rank."""
    before: dict[int, RoundRecord] = {}
    for record in records:
        if record.dp_rank in before:
            yield before[record.dp_rank], record
        before[record.dp_rank] = record


def aborted(trace: Trace) -> list[RequestEnd]:
    return [end for end in trace.ends if end.reason == "abort"]


def parts_of_request(trace: Trace, rid: str) -> list[Part]:
    return [part for (name, _), parts in parts_of(trace).items() if name == rid for part in parts]
