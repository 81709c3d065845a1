"""What the ranks of a DP group must agree on in one forward: the shape of draft states, and the token counts announced.

Read from the `idle_state` and `busy_state` events of the engine side, one a rank and model forward; an idle rank has no
rows, so this is all there is to see of it. No weights, no reference.
"""

from __future__ import annotations

from typing import Any

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind

#: (tick, phase, step): one forward that all ranks enter together.
Moment = tuple[int, str, int]


@register(
    name="idle_width",
    kinds=(Kind.SHAPE,),
    reads=("engine",),
    protects="an idle rank carries draft states of the width and dtype that busy ranks carry in the same forward",
)
def check_idle_width(evidence: Evidence) -> CheckResult:
    """SHAPE where an `idle_state` event (data: phase, step, width, dtype, held, round) is not what it should be.

    Width and dtype are those of the busy ranks; `held` counts the rows of the state, of which there must be none.
    """
    result = CheckResult()
    busy = _by_moment(evidence, "busy_state")
    for event in (event for event in evidence.engine.events if event.name == "idle_state"):
        if event.data.get("held"):
            result.divergences.append(
                _fault(event, kind=Kind.SHAPE, check="idle_width", expected=0, hint="idle-rows", field="held")
            )
        for field, hint in (("width", "idle-width"), ("dtype", "idle-dtype")):
            expected = _expected(evidence, event, field, busy.get(_moment(event), []))
            if expected in (None, "", -1):
                continue  # a forward without a draft state
            result.count("idle_states", 1)
            if event.data[field] != expected:
                result.divergences.append(
                    _fault(event, kind=Kind.SHAPE, check="idle_width", expected=expected, hint=hint, field=field)
                )
    return result


def _expected(evidence: Evidence, event: Event, field: str, busy: list[Event]) -> Any:
    """What the busy ranks bring to the same forward; for a width alone, what any rows of that phase have.

    Before the first draft step of all, what the draft gave for a prompt: that is what a draft step is fed.
    """
    if field not in event.data:
        return None
    if busy:
        return busy[0].data[field]
    phase, tensors = event.data["phase"], evidence.engine.tensors
    given = tensors.get("hidden_out.DRAFT_PREFILL") if phase == "DRAFT" else None
    rows = tensors.get(f"hidden_in.{phase}", given)
    return rows.shape[1] if rows is not None and field == "width" else None


@register(
    name="announced",
    kinds=(Kind.LOCKSTEP,),
    reads=("engine",),
    protects="every rank is told how many tokens each rank brings to a forward, and each brings that many",
)
def check_announced(evidence: Evidence) -> CheckResult:
    """LOCKSTEP where a count that a rank was told differs from the rows that rank fed."""
    result = CheckResult()
    idle, busy = _by_moment(evidence, "idle_state"), _by_moment(evidence, "busy_state")
    for moment in sorted(idle.keys() | busy.keys()):
        events = [*busy.get(moment, ()), *idle.get(moment, ())]
        if moment[2]:
            continue  # later draft steps go on with the counts that SGLang padded for the first
        rows = {event.dp_rank: event.data.get("rows") for event in events}
        for event in events:
            told = event.data.get("announced") or []
            for rank, count in enumerate(told):
                if rows.get(rank) is None:
                    continue  # a rank that did not enter: the ledger says so
                result.count("token_counts", 1)
                if count != rows[rank]:
                    exchanged = sorted(told) == sorted(rows.values())
                    hint = "exchanged" if exchanged else "own" if rank == event.dp_rank else "of-another-rank"
                    divergence = _fault(event, kind=Kind.LOCKSTEP, check="announced", expected=rows[rank], hint=hint)
                    result.divergences.append(divergence)
    return result


def _moment(event: Event) -> Moment:
    return event.tick, str(event.data["phase"]), int(event.data.get("step", 0))


def _by_moment(evidence: Evidence, name: str) -> dict[Moment, list[Event]]:
    found: dict[Moment, list[Event]] = {}
    for event in evidence.engine.events:
        if event.name == name:
            found.setdefault(_moment(event), []).append(event)
    return found


def _fault(event: Event, *, kind: Kind, check: str, expected: Any, hint: str, field: str = "announced") -> Divergence:
    _, phase, step = _moment(event)
    return Divergence(
        kind=kind,
        check=check,
        key=Key(dp_rank=event.dp_rank, rid="", epoch=0, committed=-1, phase=phase, step=step, slot=0),
        round=int(event.data.get("round", -1)),
        expected=expected,
        observed=event.data[field],
        hint=hint,
    )
