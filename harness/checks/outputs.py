"""Checks of output texts: where they end, that speculation is lossless, and that seeds decide what is drawn.

The reference carries its greedy run in events: Event('greedy', data={'rid', 'output_ids', 'margins'}), where
margins[i] is its top-1 minus top-2 logit at output i. The first difference decides: after a tie the two texts may
go different ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, register
from harness.contract.requests import RequestSpec
from harness.contract.scenario import room
from harness.contract.trace import EOS, RequestEnd
from harness.contract.types import Divergence, Kind, Phase, Policy

#: What must be equal for two requests to be one and the same draw.
Draw = tuple[tuple[int, ...], float, int]


@register(id="finish", kinds=(Kind.TOKEN,), reads=("scenario", "engine"))
def check_finish(evidence: Evidence) -> CheckResult:
    """A request stops where its own limits say, not a token earlier or later.

    TOKEN where an output runs past its stop or its length, or ends for a reason it does not have.
    """
    result = CheckResult()
    requests = {request.rid: request for request in evidence.scenario.requests}
    for end in evidence.engine.ends:
        if end.rid in requests and end.reason != "error":
            result.count("tokens", len(end.output_ids))
            result.divergences += _finish_faults(evidence, requests[end.rid], end)
    return result


def _finish_faults(evidence: Evidence, request: RequestSpec, end: RequestEnd) -> Iterator[Divergence]:
    output = end.output_ids
    ids = request.stops(evidence.engine.header.get(EOS, ()))
    stops = [index for index, token in enumerate(output) if token in ids]
    who = "aborted-" if end.reason == "abort" else ""
    most = _cut(evidence, request, request.max_new_tokens)
    if stops and stops[0] != len(output) - 1:
        yield at_output(evidence, end, stops[0], len(output) - 1 - stops[0], 0, f"{who}ran-past-stop")
    elif len(output) > request.max_new_tokens:
        limit = request.max_new_tokens
        yield at_output(evidence, end, limit, len(output), limit, f"{who}ran-past-length")
    elif end.reason == "stop" and ids and not stops and not request.ends_by_text:
        yield at_output(evidence, end, len(output) - 1, "no stop token", "a stop token", "stopped-without-stop-token")
    elif end.reason == "length" and len(output) < most and not _hit_context(evidence, request, end):
        yield at_output(evidence, end, len(output) - 1, len(output), most, "stopped-early")


def _cut(evidence: Evidence, request: RequestSpec, length: int) -> int:
    """Of `length` tokens those that it writes: of one that outgrows the pool, what SGLang cuts its number to.

    Such a one comes so far where its last drafts still fit.
    """
    fits = room(len(request.input_ids), evidence.scenario.engine)
    return min(length, fits) if request.expect == "exhaustion" else length


def _hit_context(evidence: Evidence, request: RequestSpec, end: RequestEnd) -> bool:
    """Whether the context window, as the header gives it, leaves no room for one more round."""
    window = evidence.engine.header.get("context_length")
    used = len(request.input_ids) + len(end.output_ids)
    return isinstance(window, int) and used + evidence.scenario.spec.num_draft_tokens + 1 >= window


@register(id="losslessness", kinds=(Kind.TOKEN,), reads=("scenario", "engine", "reference"))
def check_losslessness(evidence: Evidence) -> CheckResult:
    """Speculative output is the text the target would have written alone.

    TOKEN at the first output that differs from the greedy reference, unless that is a tie.
    """
    result = CheckResult()
    greedy = {str(event.data["rid"]): event.data for event in evidence.truth.named("greedy")}
    plain = {request.rid for request in evidence.scenario.requests if request.greedy}
    for end in evidence.engine.ends:
        if end.rid not in plain or end.reason == "error":
            continue
        if end.rid in greedy:
            _judge_output(evidence, end, greedy[end.rid], result)
        else:
            result.notes.append(f"losslessness of {end.rid} not judged: the reference has no greedy run of it")
    return result


def _judge_output(evidence: Evidence, end: RequestEnd, data: dict[str, Any], result: CheckResult) -> None:
    expected, request = [int(token) for token in data["output_ids"]], evidence.scenario.request(end.rid)
    both = list(zip(end.output_ids, expected, strict=False))
    place = next((at for at, (observed, wanted) in enumerate(both) if observed != wanted), None)
    result.count("tokens", len(both) if place is None else place + 1)
    if place is not None:
        margins = data.get("margins", ())
        margin = float(margins[place]) if place < len(margins) else float("inf")
        found = at_output(evidence, end, place, *both[place], "text-differs")
        result.decide(replace(found, policy=Policy.TIE, margin=margin), limit=evidence.choice_limit(end.rid))
    elif end.reason != "abort" and not request.ends_by_text:
        whole = _cut(evidence, request, len(expected))
        if len(end.output_ids) != whole:
            result.divergences.append(at_output(evidence, end, len(both), len(end.output_ids), whole, "text-length"))


def at_output(
    evidence: Evidence, end: RequestEnd, place: int, observed: object, expected: object, hint: str
) -> Divergence:
    """TOKEN at output number `place`: keyed by the row that committed it, else by the request alone."""
    index = len(evidence.scenario.request(end.rid).input_ids) + place
    return at_index(
        evidence, end.rid, index, Phase.ACCEPT, kind=Kind.TOKEN, expected=expected, observed=observed, hint=hint
    )


def at_index(
    evidence: Evidence, rid: str, index: int, phase: Phase, *, kind: Kind, expected: object, observed: object, hint: str
) -> Divergence:
    """At the row of a phase behind which the token at `index` of a request's text stands, else by the request alone."""
    row = row_of(evidence, rid, index, phase)
    if row is not None:
        return evidence.divergence(row, kind=kind, expected=expected, observed=observed, hint=hint)
    return evidence.at_request(
        rid, committed=index - 1, phase=phase, kind=kind, expected=expected, observed=observed, hint=hint
    )


def row_of(evidence: Evidence, rid: str, index: int, phase: Phase) -> int | None:
    """The row of a phase behind which the token at `index` of the request's text stands."""
    slots = evidence.table.ints["slot"]
    mine = ((share, rows) for share, rows in evidence.table.each(phase) if share[1] == rid)
    return next((row for share, rows in mine for row in rows if share[3] + 1 + slots[row] == index), None)


@register(id="seeds", kinds=(Kind.NONDETERMINISM,), reads=("scenario", "engine"))
def check_seeds(evidence: Evidence) -> CheckResult:
    """Requests with the same prompt, temperature and seed draw the same tokens, whoever shares their batch.

    NONDETERMINISM at the first token in which two such requests differ, as long as both go on.

    SGLang promises it under `enable_deterministic_inference` only. Different seeds may draw alike by chance.
    """
    result = CheckResult()
    if not evidence.scenario.engine.deterministic_inference:
        return result
    ends = {end.rid: end for end in evidence.engine.ends if end.reason != "error"}
    first: dict[Draw, RequestEnd] = {}
    for request in evidence.scenario.requests:
        if request.sampling_seed is None or request.greedy or request.rid not in ends:
            continue
        draw = (request.input_ids, request.temperature, request.sampling_seed)
        if draw in first:
            _compare_draws(evidence, request, first[draw].output_ids, ends[request.rid].output_ids, result)
        else:
            first[draw] = ends[request.rid]
    return result


def _compare_draws(
    evidence: Evidence, request: RequestSpec, expected: tuple[int, ...], observed: tuple[int, ...], result: CheckResult
) -> None:
    """Tokens of `request` against those of the request that drew first."""
    both = list(zip(expected, observed, strict=False))
    result.count("tokens", len(both))
    place = next((i for i, (wanted, seen) in enumerate(both) if wanted != seen), None)
    if place is None:
        return
    phase = Phase.ACCEPT if place else Phase.PREFILL  # the first token came with the prompt
    row = row_of(evidence, request.rid, len(request.input_ids) + place, phase)
    if row is None:
        result.unknown.append(f"seed of {request.rid} not judged: no row committed its token {place}")
        return
    wanted, seen = both[place]
    result.divergences.append(
        evidence.divergence(row, kind=Kind.NONDETERMINISM, expected=wanted, observed=seen, hint="same-seed-other-token")
    )
