"""The draft steps of a round against the reference: inputs, positions, beams, states and proposals.

The reference is conditioned: it starts each round from what the engine had committed and takes over the engine's
choices, so one wrong step is one finding and not a cascade.
"""

from __future__ import annotations

from harness.checks.compare import compare_choices, compare_integers, pairs_of
from harness.checks.evidence import Evidence
from harness.checks.numeric import compare_floats
from harness.checks.registry import CheckResult, register
from harness.contract.types import Kind, Phase

#: Every kind the column-by-column comparison can raise.
ROW_KINDS = (Kind.TOKEN, Kind.POSITION, Kind.PARENT, Kind.EXTEND_INPUT, Kind.NUMERIC, Kind.SHAPE)


@register(
    name="chain",
    kinds=ROW_KINDS,
    reads=("scenario", "engine", "reference"),
    protects="each draft step computes and proposes what the definition says, whatever the batch around it",
)
def check_chain(evidence: Evidence) -> CheckResult:
    """DRAFT rows."""
    return compare_phases(evidence, "chain", Phase.DRAFT)


def compare_phases(evidence: Evidence, check: str, *phases: Phase) -> CheckResult:
    """All columns of the aligned rows of some phases."""
    result = CheckResult()
    for phase in phases:
        pairs = pairs_of(evidence, check, phase)
        for part in (compare_integers(pairs), compare_choices(pairs), compare_floats(pairs)):
            result.add(part)
    return result
