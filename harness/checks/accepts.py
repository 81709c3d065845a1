"""Checks what a verify commits: the walk that the target's choices, or the recorded uniforms, allow.

A greedy walk needs no reference: it starts at the engine's own root and follows the engine's own target choices, which
a separate comparison holds against the reference (a tie there is followed, not repaired). A sampled one is compared
with what the reference commits under the same recorded uniforms; whether those are uniform is a question for many runs
(see `cases.sampling`).
"""

from __future__ import annotations

from dataclasses import replace

from harness.checks.evidence import Evidence, Table, tabulate
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Share
from harness.contract.providers import is_witness
from harness.contract.trace import Trace
from harness.contract.types import Kind, Phase, Policy

#: Subject of replaced operations that only a batch with a temperature asks for.
SAMPLED = "sampled"
#: A uniform this near to the end of an interval may fall on either side of it: the softmax of two float32 programs
#: differs by a few 1e-7 of a probability; in half precision a logit is off by up to a few 1e-2.
NEAREST = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}

#: (token, node that chose it), in order of commitment.
Walk = list[tuple[int, int]]


@register(
    id="walk",
    kinds=(Kind.ACCEPT, Kind.PARENT),
    reads=("scenario", "engine"),
    protects="what is committed is exactly the longest line of the tree that the target itself would have chosen",
)
def check_greedy_walk(evidence: Evidence) -> CheckResult:
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


def walk(evidence: Evidence, nodes: list[int]) -> Walk | None:
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
    committed: Walk = []
    node: int | None = 0
    while node is not None and len(committed) <= len(nodes):
        if node not in chosen:
            return None
        committed.append((chosen[node], node))
        node = children.get((node, chosen[node]))
    return committed


def _judge_walk(evidence: Evidence, share: Share, expected: Walk | None, result: CheckResult) -> None:
    if expected is None:
        return
    rows = evidence.table.of(share, Phase.ACCEPT)

    def fault(index: int, kind: Kind, wanted: int, seen: int, hint: str) -> None:
        result.divergences.append(evidence.divergence(index, kind=kind, expected=wanted, observed=seen, hint=hint))

    for place, (index, (token, parent)) in enumerate(zip(rows, _walked(evidence.table, rows), strict=True)):
        result.count("accepts", 1)
        if place >= len(expected):
            return fault(index, Kind.ACCEPT, len(expected), len(rows), "too-many")
        if token != expected[place][0]:
            return fault(index, Kind.ACCEPT, expected[place][0], token, "wrong-token")
        if parent != expected[place][1]:
            fault(index, Kind.PARENT, expected[place][1], parent, "accept-parent")
    if len(rows) < len(expected) and not truncated(evidence, share):
        fault(rows[-1], Kind.ACCEPT, len(expected), len(rows), "too-few")


def _walked(table: Table, rows: list[int]) -> Walk:
    """(token, node that it follows) of ACCEPT rows in order."""
    return [(table.ints["input_id"][row], table.ints["parent"][row]) for row in rows]


@register(
    id="sampled",
    kinds=(Kind.ACCEPT, Kind.PARENT),
    reads=("scenario", "engine", "reference"),
    protects="with a temperature, what is committed follows from the recorded uniforms and the target's probabilities",
)
def check_sampled_walk(evidence: Evidence) -> CheckResult:
    """ACCEPT and PARENT at ACCEPT rows of requests with a temperature."""
    result = CheckResult()
    drawing = {request.rid for request in evidence.scenario.requests if request.temperature > 0}
    if not drawing:
        return result
    assert evidence.reference is not None
    if is_witness(evidence.reference.header):
        return result  # it knows no probabilities: the verdict says so
    margins, truth = _margins(evidence.reference), tabulate(evidence.reference.rows)
    for share, rows in evidence.table.each(Phase.ACCEPT):
        if share[1] in drawing and share in margins:
            _judge_sampled(evidence, rows, _walked(truth, truth.of(share, Phase.ACCEPT)), margins[share], result)
        elif share[1] in drawing:
            result.unknown.append(f"sampled acceptance of {share[1]} not judged: the probe saw no uniforms of it")
    result.unknown = list(dict.fromkeys(result.unknown))
    return result


def near_ties(evidence: Evidence) -> frozenset[Share]:
    """Shares in which a uniform lay so near to the end of an interval that the two sides may decide otherwise."""
    margins = {} if evidence.reference is None else _margins(evidence.reference)
    return frozenset(share for share, margin in margins.items() if margin < _nearest(evidence))


def _nearest(evidence: Evidence) -> float:
    return NEAREST.get(evidence.dtype, NEAREST["bfloat16"])


def _margins(reference: Trace) -> dict[Share, float]:
    """How near the uniforms of a share came to deciding otherwise."""
    events = ((event.dp_rank, event.data) for event in reference.events if event.name == "sampled")
    return {(rank, data["rid"], data["attempt"], data["committed"]): float(data["margin"]) for rank, data in events}


def sampler_replaced(evidence: Evidence) -> str:
    """The kernel that walks trees by uniforms, if ours replaces it; else empty. Rejection sampling has its own."""
    if evidence.scenario.engine.rejection_sampling:
        return ""
    replaced = evidence.engine.header.get("replaced") or ()
    names = (str(entry.get("operation", "?")) for entry in replaced if entry.get("subject") == SAMPLED)
    return next((name for name in names if "sampling" in name.rpartition(".")[2]), "")


def _judge_sampled(evidence: Evidence, rows: list[int], expected: Walk, margin: float, result: CheckResult) -> None:
    found = _walked(evidence.table, rows)
    if not sampler_replaced(evidence):  # else it says nothing of the release's own kernel
        result.count("accepts", len(found))
    result.choices += len(found)
    fault = _difference(found, expected)
    if fault is None:
        return
    place, kind, hint, wanted, seen = fault
    differs = evidence.divergence(rows[min(place, len(rows) - 1)], kind=kind, expected=wanted, observed=seen, hint=hint)
    result.decide(replace(differs, policy=Policy.TIE, margin=margin), limit=_nearest(evidence))


def _difference(found: Walk, expected: Walk) -> tuple[int, Kind, str, int, int] | None:
    """(place, kind, hint, expected, observed) of the first difference of two walks, None if there is none."""
    for place, (seen, wanted) in enumerate(zip(found, expected, strict=False)):
        if seen[0] != wanted[0]:
            return place, Kind.ACCEPT, "sampled-other-token", wanted[0], seen[0]
        if seen[1] != wanted[1]:
            return place, Kind.PARENT, "sampled-other-node", wanted[1], seen[1]
    if len(found) == len(expected):
        return None
    hint = "sampled-too-many" if len(found) > len(expected) else "sampled-too-few"
    return min(len(found), len(expected)), Kind.ACCEPT, hint, len(expected), len(found)
