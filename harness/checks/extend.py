"""The draft over prompt chunks and over committed tokens: rotated inputs, handed-over states, first proposals.

A wrong width of the states is SHAPE, also for an idle rank, which has no rows: those say their width in an event.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.chain import ROW_KINDS, compare_phases
from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.types import Divergence, Key, Kind, Phase


@register(
    name="extend",
    kinds=ROW_KINDS,
    reads=("scenario", "engine", "reference"),
    protects="the draft sees the right token beside the right target state when it catches up with the target",
)
def check_extend(evidence: Evidence) -> CheckResult:
    """DRAFT_PREFILL and EXTEND rows."""
    return compare_phases(evidence, "extend", Phase.DRAFT_PREFILL, Phase.EXTEND)


@register(
    name="idle_width",
    kinds=(Kind.SHAPE,),
    reads=("engine",),
    protects="an idle rank carries draft states of the width that busy ranks carry in the same forward",
)
def check_idle_width(evidence: Evidence) -> CheckResult:
    """SHAPE where an `idle_state` event (data: phase, width, round) disagrees with the rows of that phase."""
    return CheckResult(divergences=list(_idle_faults(evidence)))


def _idle_faults(evidence: Evidence) -> Iterator[Divergence]:
    for event in evidence.engine.events:
        if event.name != "idle_state":
            continue
        phase = str(event.data["phase"])
        busy = evidence.engine.tensors.get(f"hidden_in.{phase}")
        width = int(event.data["width"])
        if busy is not None and busy.shape[1] != width:
            key = Key(dp_rank=event.dp_rank, rid="", epoch=0, committed=-1, phase=phase, step=0, slot=0)
            yield Divergence(
                kind=Kind.SHAPE,
                check="idle_width",
                key=key,
                round=int(event.data.get("round", -1)),
                expected=busy.shape[1],
                observed=width,
                hint="idle-width",
            )
