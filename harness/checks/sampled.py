"""Sampled acceptance: what the engine committed under the coins it drew, against the rule applied to the same coins.

The reference walks the tree that the engine verified, by the engine's coins and its own probabilities. It must not
judge whether coins are uniform: that is a question for many runs (see `cases.sampling`).
"""

from __future__ import annotations

from dataclasses import replace

from harness.checks.coverage import sampler_replaced
from harness.checks.evidence import Evidence, Table, tabulate
from harness.checks.registry import CheckResult, register
from harness.contract.batches import Share
from harness.contract.trace import Trace
from harness.contract.types import Kind, Phase, Policy

#: A coin this near to the end of a share may fall on either side of it: the softmax of two float32 programs differs by
#: a few 1e-7 of a probability; in half precision a logit is off by up to a few 1e-2.
NEAREST = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}


@register(
    name="sampled",
    kinds=(Kind.ACCEPT, Kind.PARENT),
    reads=("scenario", "engine", "reference"),
    protects="with a temperature, what is committed is what the drawn coins decide under the target's own law",
)
def check_sampled(evidence: Evidence) -> CheckResult:
    """ACCEPT and PARENT at ACCEPT rows of requests with a temperature."""
    result = CheckResult()
    drawing = {request.rid for request in evidence.scenario.requests if request.temperature > 0}
    if not drawing:
        return result
    assert evidence.reference is not None
    margins, truth = _margins(evidence.reference), tabulate(evidence.reference.rows)
    for share, rows in evidence.table.each(Phase.ACCEPT):
        if share[1] in drawing and share in margins:
            _judge(evidence, rows, _walk(truth, truth.of(share, Phase.ACCEPT)), margins[share], result)
        elif share[1] in drawing:
            result.unknown.append(f"sampled acceptance of {share[1]} not judged: the probe saw no coins of it")
    result.unknown = list(dict.fromkeys(result.unknown))
    return result


def near_ties(evidence: Evidence) -> frozenset[Share]:
    """Shares in which a coin lay so near to the end of a share that the two sides may decide otherwise."""
    limit = NEAREST.get(evidence.dtype, NEAREST["bfloat16"])
    margins = {} if evidence.reference is None else _margins(evidence.reference)
    return frozenset(share for share, margin in margins.items() if margin < limit)


def _margins(reference: Trace) -> dict[Share, float]:
    """How near the coins of a share came to deciding otherwise."""
    told = ((event.dp_rank, event.data) for event in reference.events if event.name == "sampled")
    return {(rank, data["rid"], data["epoch"], data["committed"]): float(data["margin"]) for rank, data in told}


def _walk(table: Table, rows: list[int]) -> list[tuple[int, int]]:
    """(token, node that it follows) of ACCEPT rows in order."""
    return [(table.ints["input_id"][row], table.ints["parent"][row]) for row in rows]


def _judge(
    evidence: Evidence, rows: list[int], expected: list[tuple[int, int]], margin: float, result: CheckResult
) -> None:
    found = _walk(evidence.table, rows)
    if not sampler_replaced(evidence):  # else it says nothing of the release's own kernel
        result.count("accepts", len(found))
    result.choices += len(found)
    fault = _difference(found, expected)
    if fault is None:
        return
    place, kind, hint, wanted, seen = fault
    at, limit = rows[min(place, len(rows) - 1)], NEAREST.get(evidence.dtype, NEAREST["bfloat16"])
    told = evidence.divergence(at, kind=kind, check="sampled", expected=wanted, observed=seen, hint=hint)
    result.decide(replace(told, policy=Policy.TIE, margin=margin), limit=limit)


def _difference(
    found: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> tuple[int, Kind, str, int, int] | None:
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
