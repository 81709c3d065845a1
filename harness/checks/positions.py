"""Checks positions and tree parents by their meaning: no weights, no reference, no tolerance.

draft step i of a request with committed length c runs at c+i; a tree node of depth d at c+d; row j of a chunk or an
extend that starts at p at p+j. Also the shape of the tree itself: one root, every other node under a known one.
"""

from __future__ import annotations

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.align import Ints
from harness.contract.types import RUNNING, Kind, Phase


@register(id="positions", kinds=(Kind.POSITION, Kind.PARENT), reads=("engine",))
def check_positions(evidence: Evidence) -> CheckResult:
    """Every forward runs at the position its token has in the request, and the draft tree is a tree.

    POSITION and PARENT from rows alone.
    """
    result, rows = CheckResult(), evidence.engine.rows
    phases, committed = rows.strings["phase"], rows.ints["committed"]
    running = np.logical_or.reduce([phases == phase for phase in RUNNING])
    for column, mine in (("slot", running), ("step", phases == Phase.DRAFT)):
        where = np.flatnonzero(mine)
        _compare(evidence, where, (committed + rows.ints[column])[where], result)
    for share, indices in evidence.table.each(Phase.VERIFY):
        depths = _depths(evidence, indices, result)
        known = [(index, share[3] + depth) for index, depth in zip(indices, depths, strict=True) if depth is not None]
        at, expected = np.asarray(known, dtype=np.int64).reshape(-1, 2).T
        _compare(evidence, at, expected, result)
    return result


def _compare(evidence: Evidence, rows: Ints, expected: Ints, result: CheckResult) -> None:
    """POSITION at engine rows [m] that do not stand at `expected` [m]; the hint says by how much they are off."""
    observed = evidence.engine.rows.ints["position"][rows]
    result.count("positions", len(rows))
    for place in np.flatnonzero(observed != expected):
        wanted, seen = int(expected[place]), int(observed[place])
        found = evidence.divergence(
            int(rows[place]), kind=Kind.POSITION, expected=wanted, observed=seen, hint=offset_hint(seen - wanted)
        )
        result.divergences.append(found)


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
                evidence.divergence(index, kind=Kind.PARENT, expected=expected, observed=parents[index], hint=fault)
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
