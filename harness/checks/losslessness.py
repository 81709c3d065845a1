"""Output against the non-speculative reference: speculation may change speed, never text.

The reference carries its greedy run in events: Event('greedy', data={'rid', 'output_ids', 'margins'}), where
margins[i] is its top-1 minus top-2 logit at output i. The first difference decides: after a tie the two texts may
go different ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.tolerance import budget_for, tie_limit
from harness.contract.trace import RequestEnd
from harness.contract.types import Divergence, Key, Kind, Phase, Policy, RequestSpec


@register(
    name="finish",
    kinds=(Kind.TOKEN,),
    reads=("scenario", "engine"),
    protects="a request stops where its own limits say, not a token earlier or later",
)
def check_finish(evidence: Evidence) -> CheckResult:
    """TOKEN where an output runs past its stop or its length, or ends for a reason it does not have."""
    result = CheckResult()
    requests = {request.rid: request for request in evidence.scenario.requests}
    for end in evidence.engine.ends:
        if end.rid in requests and end.reason != "error":
            result.count("tokens", len(end.output_ids))
            result.divergences += _finish_faults(evidence, requests[end.rid], end)
    return result


def _finish_faults(evidence: Evidence, request: RequestSpec, end: RequestEnd) -> Iterator[Divergence]:
    output = end.output_ids
    stops = [index for index, token in enumerate(output) if token in request.stop_ids]
    who = "aborted-" if end.reason == "abort" else ""
    if stops and stops[0] != len(output) - 1:
        yield _at_output(evidence, end, stops[0], len(output) - 1 - stops[0], 0, f"{who}ran-past-stop")
    elif len(output) > request.max_new_tokens:
        limit = request.max_new_tokens
        yield _at_output(evidence, end, limit, len(output), limit, f"{who}ran-past-length")
    elif end.reason == "stop" and request.stop_ids and not stops:
        yield _at_output(evidence, end, len(output) - 1, "no stop token", "a stop token", "stopped-without-stop-token")
    elif end.reason == "length" and len(output) < request.max_new_tokens and not _hit_context(evidence, request, end):
        yield _at_output(evidence, end, len(output) - 1, len(output), request.max_new_tokens, "stopped-early")


def _hit_context(evidence: Evidence, request: RequestSpec, end: RequestEnd) -> bool:
    """Whether the context window, as the header tells it, leaves no room for one more round."""
    window = evidence.engine.header.get("context_length")
    used = len(request.prompt) + len(end.output_ids)
    return isinstance(window, int) and used + evidence.scenario.spec.n + 1 >= window


@register(
    name="losslessness",
    kinds=(Kind.TOKEN,),
    reads=("scenario", "engine", "reference"),
    protects="speculative output is the text the target would have written alone",
)
def check_losslessness(evidence: Evidence) -> CheckResult:
    """TOKEN at the first output that differs from the greedy reference, unless that is a tie."""
    result = CheckResult()
    assert evidence.reference is not None
    greedy = {str(event.data["rid"]): event.data for event in evidence.reference.events if event.name == "greedy"}
    temperatures = {request.rid: request.temperature for request in evidence.scenario.requests}
    for end in evidence.engine.ends:
        if temperatures.get(end.rid) != 0.0 or end.reason == "error":
            continue
        if end.rid in greedy:
            _judge_output(evidence, end, greedy[end.rid], result)
        else:
            result.notes.append(f"losslessness of {end.rid} not judged: the reference has no greedy run of it")
    return result


def _judge_output(evidence: Evidence, end: RequestEnd, data: dict[str, Any], result: CheckResult) -> None:
    expected = [int(token) for token in data["output_ids"]]
    for place, (observed, wanted) in enumerate(zip(end.output_ids, expected, strict=False)):
        result.count("tokens", 1)
        if observed == wanted:
            continue
        margins = data.get("margins", ())
        margin = float(margins[place]) if place < len(margins) else float("inf")
        scale, own = _scale(evidence, end.rid)
        limit = tie_limit(scale=scale, budget=budget_for(evidence.dtype), own_error=own)
        found = _at_output(
            evidence,
            end,
            place,
            observed,
            wanted,
            "text-differs",
            check="losslessness",
            policy=Policy.TIE,
            margin=margin,
        )
        result.decide(found, limit=limit)
        return
    if end.reason != "abort" and len(end.output_ids) != len(expected):
        place = min(len(end.output_ids), len(expected))
        result.divergences.append(
            _at_output(evidence, end, place, len(end.output_ids), len(expected), "text-length", check="losslessness")
        )


def _scale(evidence: Evidence, rid: str) -> tuple[float, float]:
    """Greatest |logit| the reference has for the request's target rows, and the greatest error of its run in the
    engine's dtype there (NaN without one)."""
    assert evidence.reference is not None
    rows = evidence.reference.rows
    wanted = (rows.strings["rid"] == rid) & np.isin(rows.strings["phase"].astype(str), (Phase.PREFILL, Phase.VERIFY))
    indices = np.flatnonzero(wanted)
    scale = max((float(np.abs(rows.lists["top_logits"][row]).max(initial=0.0)) for row in indices), default=0.0)
    own = evidence.own_errors(indices)
    return scale, float(np.nanmax(own)) if np.isfinite(own).any() else float("nan")


def _at_output(
    evidence: Evidence,
    end: RequestEnd,
    place: int,
    observed: object,
    expected: object,
    hint: str,
    *,
    check: str = "finish",
    policy: Policy = Policy.EXACT,
    margin: float | None = None,
) -> Divergence:
    """TOKEN at output number `place`: keyed by the row that committed it, else by the request alone."""
    index = len(evidence.scenario.request(end.rid).prompt) + place
    slots, last = evidence.table.ints["slot"], evidence.last.get(end.rid)
    for share, rows in evidence.table.each(Phase.ACCEPT):
        for row in rows if share[1] == end.rid else ():
            if share[3] + 1 + slots[row] == index:
                key, where = evidence.table.rows.key(row), evidence.table.ints["round"][row]
                break
        else:
            continue
        break
    else:
        dp_rank, epoch = (last.record.dp_rank, last.epoch) if last else (0, 0)
        where = last.record.index if last else -1
        key = Key(dp_rank=dp_rank, rid=end.rid, epoch=epoch, committed=index - 1, phase=Phase.ACCEPT, step=0, slot=0)
    return Divergence(
        kind=Kind.TOKEN,
        check=check,
        key=key,
        round=where,
        expected=expected,
        observed=observed,
        policy=policy,
        margin=margin,
        hint=hint,
    )
