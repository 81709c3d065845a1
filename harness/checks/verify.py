"""The target: prompt rows, tree rows, and the walk that accepts.

The walk needs no reference: it starts at the engine's own root and follows the engine's own target choices, which a
separate comparison holds against the reference (a tie there is followed, not repaired).
"""

from __future__ import annotations

from harness.checks.chain import ROW_KINDS, compare_phases
from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Share
from harness.contract.types import Kind, Phase


@register(
    name="verify",
    kinds=ROW_KINDS,
    reads=("scenario", "engine", "reference"),
    protects="the target sees the same tree and makes the same choice at each node as it would alone",
)
def check_verify(evidence: Evidence) -> CheckResult:
    """PREFILL and VERIFY rows."""
    return compare_phases(evidence, "verify", Phase.PREFILL, Phase.VERIFY)


@register(
    name="walk",
    kinds=(Kind.ACCEPT, Kind.PARENT),
    reads=("scenario", "engine"),
    protects="what is committed is exactly the longest line of the tree that the target itself would have chosen",
)
def check_walk(evidence: Evidence) -> CheckResult:
    """ACCEPT and PARENT at ACCEPT rows of greedy requests."""
    result = CheckResult()
    greedy = {request.rid for request in evidence.scenario.requests if request.temperature == 0.0}
    for share, nodes in evidence.table.each(Phase.VERIFY):
        if share[1] in greedy and evidence.table.of(share, Phase.ACCEPT):
            _judge_walk(evidence, share, walk(evidence, nodes), result)
    return result


def truncated(evidence: Evidence, share: Share) -> bool:
    """Whether the share's walk may be shorter than the tree allows: its request ended there and the release cuts it.

    Older workers cut the accepted run at the stop token or the length limit, newer ones only the output.
    """
    if not evidence.engine.header.get("truncates_at_finish") or share[1] not in evidence.ended:
        return False
    return evidence.last[share[1]].share == share


def walk(evidence: Evidence, nodes: list[int]) -> list[tuple[int, int]] | None:
    """(token, node that chose it) in order of commitment, the bonus last; None if a choice is not recorded.

    nodes: VERIFY row numbers of one share, by slot.
    """
    table = evidence.table
    children: dict[tuple[int, int], int] = {}
    chosen: dict[int, int] = {}
    for index in nodes:
        slot = table.ints["slot"][index]
        children.setdefault((table.ints["parent"][index], table.ints["input_id"][index]), slot)
        if table.chosen(index):
            chosen[slot] = table.chosen(index)[0]
    committed: list[tuple[int, int]] = []
    node: int | None = 0
    while node is not None and len(committed) <= len(nodes):
        if node not in chosen:
            return None
        committed.append((chosen[node], node))
        node = children.get((node, chosen[node]))
    return committed


def _judge_walk(evidence: Evidence, share: Share, expected: list[tuple[int, int]] | None, result: CheckResult) -> None:
    if expected is None:
        return
    table = evidence.table
    rows = table.of(share, Phase.ACCEPT)
    for place, index in enumerate(rows):
        result.count("accepts", 1)
        token, parent = table.ints["input_id"][index], table.ints["parent"][index]
        if place >= len(expected):
            _fault(evidence, index, Kind.ACCEPT, len(expected), len(rows), "too-many", result)
            return
        if token != expected[place][0]:
            _fault(evidence, index, Kind.ACCEPT, expected[place][0], token, "wrong-token", result)
            return
        if parent != expected[place][1]:
            _fault(evidence, index, Kind.PARENT, expected[place][1], parent, "accept-parent", result)
    if len(rows) < len(expected) and not truncated(evidence, share):
        _fault(evidence, rows[-1], Kind.ACCEPT, len(expected), len(rows), "too-few", result)


def _fault(
    evidence: Evidence, index: int, kind: Kind, expected: int, observed: int, hint: str, result: CheckResult
) -> None:
    found = evidence.divergence(index, kind=kind, check="walk", expected=expected, observed=observed, hint=hint)
    result.divergences.append(found)
