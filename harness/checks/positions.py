"""Where a row sits, from its meaning alone: no weights, no reference, no tolerance.

draft step i of a request with committed length c runs at c+i; a tree node of depth d at c+d; row j of a chunk or an
extend that starts at p at p+j. Also the shape of the tree itself: one root, every other node under a known one.
"""

from __future__ import annotations

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.types import Divergence, Kind, Phase

#: Phases whose row j sits at start + j.
RUNNING = (Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.EXTEND)


@register(
    name="positions",
    kinds=(Kind.POSITION, Kind.PARENT),
    reads=("engine",),
    protects="every forward runs at the position its token has in the request, and the draft tree is a tree",
)
def check_positions(evidence: Evidence) -> CheckResult:
    """POSITION and PARENT from rows alone."""
    result = CheckResult()
    _running_rows(evidence, result)
    _draft_rows(evidence, result)
    for share, indices in evidence.table.each(Phase.VERIFY):
        depths = _depths(evidence, indices, result)
        for index, depth in zip(indices, depths, strict=True):
            if depth is not None:
                _compare(evidence, index, share[3] + depth, result)
    return result


def _running_rows(evidence: Evidence, result: CheckResult) -> None:
    slots = evidence.table.ints["slot"]
    for share, indices in evidence.table.each(*RUNNING):
        for index in indices:
            _compare(evidence, index, share[3] + slots[index], result)


def _draft_rows(evidence: Evidence, result: CheckResult) -> None:
    steps = evidence.table.ints["step"]
    for share, indices in evidence.table.each(Phase.DRAFT):
        for index in indices:
            _compare(evidence, index, share[3] + steps[index], result)


def _compare(evidence: Evidence, index: int, expected: int, result: CheckResult) -> None:
    result.count("positions", 1)
    observed = evidence.table.ints["position"][index]
    if observed != expected:
        result.divergences.append(position_divergence(evidence, index, expected, check="positions"))


def position_divergence(evidence: Evidence, index: int, expected: int, *, check: str) -> Divergence:
    """POSITION at engine row `index`; the hint says by how much it is off."""
    observed = evidence.table.ints["position"][index]
    return evidence.divergence(
        index,
        kind=Kind.POSITION,
        check=check,
        expected=expected,
        observed=observed,
        hint=offset_hint(observed - expected),
    )


def offset_hint(offset: int) -> str:
    """one-ahead, one-behind, ahead, behind."""
    side = "ahead" if offset > 0 else "behind"
    return f"one-{side}" if abs(offset) == 1 else side


def _depths(evidence: Evidence, indices: list[int], result: CheckResult) -> list[int | None]:
    """Depth of each node, None where the parents do not lead to the root (then PARENT is reported)."""
    slots, parents = evidence.table.ints["slot"], evidence.table.ints["parent"]
    parent_of = {slots[index]: parents[index] for index in indices}
    depths: list[int | None] = []
    for index in indices:
        fault = _parent_fault(slots[index], parent_of)
        depths.append(None if fault else _depth(slots[index], parent_of))
        if fault:
            expected = -1 if slots[index] == 0 else "a node whose line ends at the root"
            result.divergences.append(
                evidence.divergence(
                    index,
                    kind=Kind.PARENT,
                    check="positions",
                    expected=expected,
                    observed=parents[index],
                    hint=fault,
                )
            )
    result.count("parents", len(indices))
    return depths


def _parent_fault(node: int, parent_of: dict[int, int]) -> str:
    """What keeps `node` from reaching the root at slot 0, empty if nothing does."""
    parent = parent_of[node]
    if node == 0:
        return "" if parent == -1 else "root-has-parent"
    if parent == -1:
        return "second-root"
    if parent not in parent_of:
        return "no-such-node"
    return "" if _depth(node, parent_of) is not None else "no-way-to-root"


def _depth(node: int, parent_of: dict[int, int]) -> int | None:
    """Steps from the root, None if the root is never reached."""
    depth = 0
    while node != 0:
        node, depth = parent_of.get(node, -1), depth + 1
        if node < 0 or depth > len(parent_of):
            return None
    return depth
