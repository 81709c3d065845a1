"""States that a draft step hands to the next one are copied, so they must arrive bit by bit.

What a step reads is compared with the reference too, within a budget; but in half precision that budget lets a state
pass that went through a coarser dtype on its way. What the engine itself handed on is known exactly, so no budget is
needed. In float32 the budget is far below what any narrower dtype does to a state, so this is not asked there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Part
from harness.contract.types import Kind, Phase

NARROW = ("float16", "bfloat16")


@register(
    name="states",
    kinds=(Kind.NUMERIC,),
    reads=("scenario", "engine"),
    protects="a draft step reads exactly the state that was left for it, also where half precision would hide a change",
)
def check_states(evidence: Evidence) -> CheckResult:
    """NUMERIC for rows of a draft step whose state is not, bit by bit, the one that was handed on."""
    result = CheckResult()
    read = evidence.engine.tensors.get("hidden_in.DRAFT")
    if read is None or evidence.dtype not in NARROW:
        return result
    ints = evidence.table.ints
    for row, phase, source in _handed(evidence):
        left = evidence.engine.tensors.get(f"hidden_out.{phase}")
        mine, theirs = ints["hidden_in"][row], ints["hidden_out"][source]
        if left is None or mine < 0 or theirs < 0 or left.shape[1] != read.shape[1]:
            continue  # what is not there, or has another width, the comparison with the reference names
        off = np.flatnonzero(read[mine] != left[theirs])
        if len(off):
            greatest = float(np.abs(read[mine] - left[theirs]).max())
            observed = {"greatest_abs": greatest, "at": int(off[0]), "mismatched": len(off), "of": read.shape[1]}
            expected = f"the state that {phase} left, bit by bit"
            result.divergences.append(
                evidence.divergence(
                    row, kind=Kind.NUMERIC, check="states", expected=expected, observed=observed, hint="hidden_in-off"
                )
            )
    return result


def _handed(evidence: Evidence) -> Iterator[tuple[int, Phase, int]]:
    """(draft row, phase and row that left its state): steps of a chain, and every beam's first step."""
    table, chain = evidence.table, evidence.scenario.spec.t == 1
    for parts in evidence.parts.values():
        for before, part in pairwise(parts):
            if part.record.mode != "DECODE":
                continue
            rows = table.of(part.share, Phase.DRAFT)
            # What another engine handed over is the handoff checks' business; its key is the first decode batch's too.
            found = None if before.record.mode == "PREBUILT" else _left_by(evidence, before)
            if found is not None:
                yield from ((row, *found) for row in rows if table.ints["step"][row] == 0)
            steps = {table.ints["step"][row]: row for row in rows}
            if chain:
                yield from ((row, Phase.DRAFT, steps[step - 1]) for step, row in steps.items() if step - 1 in steps)


def _left_by(evidence: Evidence, part: Part) -> tuple[Phase, int] | None:
    """The last draft row over a prompt or over committed tokens that a batch ran for a request."""
    for phase in (Phase.EXTEND, Phase.DRAFT_PREFILL):
        rows = evidence.table.of(part.share, phase)
        if rows:
            return phase, rows[-1]
    return None
