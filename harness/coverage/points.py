"""The registry of coverage points, their counts over a run, and helpers that predicates share.

This module must not judge rows and must not know a point by name, accept lengths apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from harness.contract.batches import Part, leading_rounds, parts_of
from harness.contract.scenario import Scenario
from harness.contract.trace import RequestEnd, RoundRecord, Trace
from harness.contract.types import Verdict

#: Where it happened: a whole batch, one request's part of it, or a moment that ran no rows (None).
Place = RoundRecord | Part | None
Find = Callable[[Scenario, Trace], Iterable[Place]]

#: k is at most 16, so an accept length is at most 17.
LONGEST_ACCEPT = 17


class Where(StrEnum):
    """The engines on which a point can happen at all."""

    ANYWHERE = "any engine"
    UPDATED = "an engine that is given other weights"
    PREFILL_GRAPHS = "an engine that reads prompts in CUDA graphs"
    MIXED = "an engine with mixed chunks"
    WINDOWS = "an engine with a pool of its own for sliding windows"
    RECURRENT = "an engine whose target keeps recurrent states"
    HOST = "an engine with a hierarchical cache"
    ADAPTIVE = "an engine that changes its number of draft steps"
    ADAPTERS = "an engine with LoRA adapters"
    RANKS = "two ranks of DP attention"
    MORE_RANKS = "more than two ranks of DP attention"
    HANDOFF = "a prefill and a decode engine"
    HANDOFF_RANKS = "a prefill and a decode engine, the latter with ranks of DP attention"
    ELSEWHERE = "no engine that speculates and runs alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveragePoint:
    """A name, what it means, where it can happen, and where it did on a trace: one place each time."""

    name: str
    meaning: str
    where: Where
    find: Find

    def count(self, scenario: Scenario, trace: Trace) -> int:
        """How many times it happened."""
        return sum(1 for _ in self.find(scenario, trace))


POINTS: dict[str, CoveragePoint] = {}


def coverage_point(meaning: str, *, where: Where = Where.ANYWHERE) -> Callable[[Find], Find]:
    """Decorator: the function's name is the point's name."""

    def keep(find: Find) -> Find:
        name = find.__name__
        if name in POINTS:
            raise ValueError(f"coverage point {name!r} is defined twice")
        POINTS[name] = CoveragePoint(name=name, meaning=meaning, where=where, find=find)
        return find

    return keep


def names(*where: Where) -> tuple[str, ...]:
    """The points that can happen on these engines only, in order of definition."""
    return tuple(point.name for point in POINTS.values() if point.where in where)


def count(scenario: Scenario, trace: Trace) -> tuple[dict[str, int], dict[str, int]]:
    """(point -> times it happened, point -> positions where it did); accept lengths beyond k+1 are left out.

    A position is a row that has one, in the batches, or parts of batches, where it happened; each row once.
    """
    beyond = {f"accept_len_{length}" for length in range(scenario.spec.most_steps + 2, LONGEST_ACCEPT + 1)}
    times, inside = {}, {}
    for point in POINTS.values():
        if point.name not in beyond:
            places = list(point.find(scenario, trace))
            rows = np.zeros(len(trace.rows), dtype=bool)
            for place in places:
                rows |= _rows_of(place, trace)
            times[point.name], inside[point.name] = len(places), int(rows.sum())
    return times, inside


def _rows_of(place: Place, trace: Trace) -> np.ndarray:
    """bool [R]: the rows that lie in a place."""
    ints = trace.rows.ints
    if place is None:
        return np.zeros(len(trace.rows), dtype=bool)
    record = place.record if isinstance(place, Part) else place
    inside: np.ndarray = (ints["position"] >= 0) & (ints["round"] == record.index) & (ints["dp_rank"] == record.dp_rank)
    if isinstance(place, Part):
        inside &= trace.rows.strings["rid"] == place.rid
    return inside


# Counts over a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One line of a run's coverage table.

    generated: scenarios that asked for it; reached: those of them where it happened; seen: all scenarios where it
    happened; times: how often in all; positions: rows compared inside it.
    """

    name: str
    generated: int = 0
    reached: int = 0
    seen: int = 0
    times: int = 0
    positions: int = 0


def reach_of(judged: Iterable[tuple[Scenario, Verdict]]) -> list[Reach]:
    """The lines of a run that say anything: asked for, or seen."""
    lines = {name: Reach(name=name) for name in POINTS}
    for scenario, verdict in judged:
        for name, times in verdict.coverage.items():
            line, wanted = lines.get(name, Reach(name=name)), name in scenario.wants
            lines[name] = Reach(
                name=name,
                generated=line.generated + wanted,
                reached=line.reached + (wanted and times > 0),
                seen=line.seen + (times > 0),
                times=line.times + times,
                positions=line.positions + verdict.inside.get(name, 0),
            )
    return [line for line in lines.values() if line.generated or line.seen]


# Words of the predicates


def chunks_of(trace: Trace) -> Iterator[list[Part]]:
    """The prefill parts of each (rid, attempt), in order; only where there are any."""
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


def points_of_keys(keys: Iterable[str], find: Callable[[Scenario, Trace, str], Iterator[Place]]) -> None:
    """A point `verify_by_KEY` for each key of requests; find: the verifies in which that key decides."""
    for key in keys:

        def point(scenario: Scenario, trace: Trace, *, key: str = key) -> Iterator[Place]:
            return find(scenario, trace, key)

        point.__name__ = f"verify_by_{key}"
        coverage_point(f"a verify of a request that asks for {key}")(point)


def running_after(trace: Trace, side: str | None = None) -> dict[tuple[int, int], set[str]]:
    """(scheduler step, DP rank) -> requests that were running there after that step. side: of a pair of engines."""
    steps = (event for event in trace.named("turn") if side in (None, event.data.get("side")))
    return {(event.scheduler_step, event.dp_rank): set(event.data.get("running", ())) for event in steps}


def first_tokens(trace: Trace, rids: Collection[str]) -> Iterator[Part]:
    """The last prompt batches of these requests, which choose the token after a prompt."""
    for parts in parts_of(trace).values():
        yield from (part for part in parts if part.rid in rids and part.record.mode == "PREFILL" and part.final)


def last_output(scenario: Scenario, end: RequestEnd) -> int:
    """Index, in the request's text, of its last output token."""
    return len(scenario.request(end.rid).input_ids) + len(end.output_ids) - 1


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
