"""A trace's batches as each request saw them.

Shared by the checks, the coverage points and the reference. This module must not judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from harness.contract.settings import SpecConfig
from harness.contract.trace import Event, RoundRecord, Trace

#: (dp_rank, rid, attempt, committed): one request's share of one batch.
Share = tuple[int, str, int, int]
#: What a hierarchical cache copies -> (where from, where to), as an event names the slots.
COPIED = {
    "stored": ("device", "host"),
    "loaded": ("host", "device"),
    "kept": ("host", "storage"),
    "fetched": ("storage", "host"),
}


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One request's part in one batch: the entry of a RoundRecord that belongs to it."""

    record: RoundRecord
    rid: str
    attempt: int
    start: int
    length: int
    final: bool

    def spec(self, spec: SpecConfig) -> SpecConfig:
        """That of its round, where the number of steps changes."""
        return spec.of_round(self.record.num_steps)

    @property
    def share(self) -> Share:
        """The key of the rows this part left."""
        return (self.record.dp_rank, self.rid, self.attempt, self.start)


def event_at(part: Part, name: str, **data: Any) -> Event:
    """An event that speaks of one request in one batch."""
    named = {"rid": part.rid, "attempt": part.attempt, "committed": part.start}
    record = part.record
    return Event(name=name, scheduler_step=record.scheduler_step, dp_rank=record.dp_rank, data=named | data)


def share_of(event: Event) -> Share:
    """Of an event that speaks of one request in one batch."""
    return (event.dp_rank, event.data["rid"], event.data["attempt"], event.data["committed"])


def shares_of(event: Event, *names: str) -> Iterator[tuple[Any, ...]]:
    """(share, what each of its lists `names` has there) of an event that speaks of several requests of one batch."""
    columns = (event.data[name] for name in ("rids", "attempts", "committed", *names))
    for rid, attempt, committed, *more in zip(*columns, strict=True):
        yield ((event.dp_rank, rid, attempt, committed), *more)


def leading_rounds(trace: Trace) -> list[RoundRecord]:
    """The batches as the first tensor-parallel rank of each DP rank saw them, in order of time."""
    kept = _of_first_ranks([(record.dp_rank, record.tp_rank, record) for record in trace.rounds])
    return sorted(kept, key=lambda record: (record.scheduler_step, record.dp_rank, record.index))


def copies(trace: Trace) -> list[Event]:
    """What was copied to and from the host, in order, by the first rank of each; before the round that it names."""
    told = [(event.dp_rank, event.data.get("tp_rank", 0), event) for event in trace.named("host")]
    return sorted(_of_first_ranks(told), key=lambda event: event.data["round"])


def _of_first_ranks(found: Sequence[tuple[int, int, T]]) -> list[T]:
    """Of things by DP and TP rank, those of the first TP rank of each DP rank."""
    first = dict[int, int]()
    for dp_rank, tp_rank, _ in found:
        first[dp_rank] = min(tp_rank, first.get(dp_rank, tp_rank))
    return [one for dp_rank, tp_rank, one in found if tp_rank == first[dp_rank]]


def parts_of(trace: Trace) -> dict[tuple[str, int], list[Part]]:
    """(rid, attempt) -> its parts in order of time."""
    parts: dict[tuple[str, int], list[Part]] = {}
    for part in parts_in(leading_rounds(trace)):
        parts.setdefault((part.rid, part.attempt), []).append(part)
    return parts


def parts_in(records: Iterable[RoundRecord]) -> Iterator[Part]:
    """Every request's part in every batch, in their order."""
    for record in records:
        columns = zip(record.rids, record.attempts, record.starts, record.lens, record.final, strict=True)
        for rid, attempt, start, length, final in columns:
            yield Part(record=record, rid=rid, attempt=attempt, start=start, length=length, final=final)
