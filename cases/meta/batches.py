"""Batches, ends and events made by hand: the smallest traces, for what is judged or counted without rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness.contract.batches import Part
from harness.contract.rows import RowBuilder
from harness.contract.trace import Event, RequestEnd, RoundRecord, Trace


def record(step: int, mode: str, parts: Iterable[Sequence[Any]], dp_rank: int = 0, **more: Any) -> RoundRecord:
    """The batch of a scheduler step. parts: (rid, attempt, start, length, final); more: other fields of the record."""
    rids, attempts, starts, lens, final = zip(*parts, strict=True) if parts else ((), (), (), (), ())
    fields: dict[str, Any] = {
        "index": step,
        "scheduler_step": step,
        "dp_rank": dp_rank,
        "tp_rank": dp_rank,
        "mode": mode,
        "rids": rids,
        "attempts": attempts,
        "starts": starts,
        "lens": lens,
        "final": final,
        "forwards": {"PREFILL": 1} if mode == "PREFILL" else {"VERIFY": 1},
    }
    return RoundRecord(**fields | more)


def prefill(step: int, *parts: tuple[str, int, int, bool], dp_rank: int = 0, attempt: int = 0) -> RoundRecord:
    """parts: (rid, start, length, final)."""
    return record(step, "PREFILL", [(rid, attempt, *rest) for rid, *rest in parts], dp_rank)


def decode(step: int, *parts: tuple[str, int, int], dp_rank: int = 0) -> RoundRecord:
    """parts: (rid, start, accept length)."""
    return record(step, "DECODE", [(rid, 0, start, length, False) for rid, start, length in parts], dp_rank)


def lone_part(mode: str, *, start: int, length: int, index: int = 0, final: bool = True) -> Part:
    """A request `a`'s part in a batch of its own."""
    made = record(index, mode, [("a", 0, start, length, final)], forwards={})
    return Part(record=made, rid="a", attempt=0, start=start, length=length, final=final)


def end(rid: str, step: int, count: int, reason: str = "length") -> RequestEnd:
    """The end of a request with so many output tokens."""
    return RequestEnd(rid=rid, scheduler_step=step, reason=reason, output_ids=tuple(range(count)))


def event(name: str, step: int = 0, *, dp_rank: int = 0, **data: Any) -> Event:
    """What an engine reports of a scheduler step."""
    return Event(name=name, scheduler_step=step, dp_rank=dp_rank, data=data)


def turn(step: int, *, running: Sequence[str] = (), waiting: Sequence[str] = (), **more: Any) -> Event:
    """Who runs and who waits before a scheduler step."""
    return event("turn", step, running=list(running), waiting=list(waiting), **more)


def taken_back(step: int, *rids: str, reason: str = "asked") -> Event:
    """Some requests of a batch are retracted."""
    return event("retract", step, rids=rids, kept=(), reason=reason)


def trace(*rounds: RoundRecord, ends: Sequence[RequestEnd] = (), events: Sequence[Event] = (), **more: Any) -> Trace:
    """What an engine without rows left. more: other fields of the trace."""
    fields: dict[str, Any] = {"side": "engine", "scenario_id": "", "header": {}, "rows": RowBuilder().build()}
    return Trace(**fields | more, rounds=rounds, ends=tuple(ends), events=tuple(events))
