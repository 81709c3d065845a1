"""Seeds of requests: where an engine promises that a seed decides what is drawn, two requests with one seed draw alike.

SGLang promises it under `enable_deterministic_inference` only. Needs no reference, and no coin: it compares outputs. It
must not judge whether different seeds differ, which may happen by chance.
"""

from __future__ import annotations

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.trace import RequestEnd
from harness.contract.types import Kind, Phase, RequestSpec

#: What must be equal for two requests to be one and the same draw.
Draw = tuple[tuple[int, ...], float, int]


@register(
    name="seeds",
    kinds=(Kind.NONDETERMINISM,),
    reads=("scenario", "engine"),
    protects="requests with the same prompt, temperature and seed draw the same tokens, whoever shares their batch",
)
def check_seeds(evidence: Evidence) -> CheckResult:
    """NONDETERMINISM at the first token in which two such requests differ, as long as both go on."""
    result = CheckResult()
    if not evidence.scenario.engine.deterministic:
        return result
    ends = {end.rid: end for end in evidence.engine.ends if end.reason != "error"}
    first: dict[Draw, RequestEnd] = {}
    for request in evidence.scenario.requests:
        if request.seed is None or request.temperature == 0 or request.rid not in ends:
            continue
        draw = (request.prompt, request.temperature, request.seed)
        if draw not in first:
            first[draw] = ends[request.rid]
            continue
        _compare(evidence, request, first[draw].output_ids, ends[request.rid].output_ids, result)
    return result


def _compare(
    evidence: Evidence, request: RequestSpec, expected: tuple[int, ...], observed: tuple[int, ...], result: CheckResult
) -> None:
    """Tokens of `request` against those of the request that drew first."""
    both = list(zip(expected, observed, strict=False))
    result.count("tokens", len(both))
    place = next((i for i, (wanted, seen) in enumerate(both) if wanted != seen), None)
    if place is None:
        return
    row = _row_of(evidence, request, len(request.prompt) + place)
    if row is None:
        result.unknown.append(f"seed of {request.rid} not judged: no row committed its token {place}")
        return
    wanted, seen = both[place]
    hint = "same-seed-other-token"
    result.divergences.append(
        evidence.divergence(row, kind=Kind.NONDETERMINISM, check="seeds", expected=wanted, observed=seen, hint=hint)
    )


def _row_of(evidence: Evidence, request: RequestSpec, index: int) -> int | None:
    """The row that committed the token at `index` of the request's text."""
    slots = evidence.table.ints["slot"]
    for share, rows in evidence.table.each(Phase.ACCEPT, Phase.PREFILL):
        if share[1] != request.rid:
            continue
        for row in rows:
            ahead = share[3] + 1 + slots[row]
            if ahead == index and (evidence.table.phase[row] == Phase.ACCEPT or index == len(request.prompt)):
                return row
    return None
