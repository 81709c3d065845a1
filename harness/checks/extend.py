"""The draft over prompt chunks and over committed tokens: rotated inputs, handed-over states, first proposals.

A wrong width of the states is SHAPE; of an idle rank, which has no rows, see `ranks`.
"""

from __future__ import annotations

from harness.checks.chain import ROW_KINDS, compare_phases
from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.types import Phase


@register(
    name="extend",
    kinds=ROW_KINDS,
    reads=("scenario", "engine", "reference"),
    protects="the draft sees the right token beside the right target state when it catches up with the target",
)
def check_extend(evidence: Evidence) -> CheckResult:
    """DRAFT_PREFILL and EXTEND rows."""
    return compare_phases(evidence, "extend", Phase.DRAFT_PREFILL, Phase.EXTEND)
