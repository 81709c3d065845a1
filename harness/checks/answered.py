"""Checks of what comes back beside tokens: usage and speculation counts, finish reasons, and pieces of a stream.

Counts follow from the batches that the trace says ran. Log-probabilities and hidden states have modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from harness.checks.accepts import truncated, walk
from harness.checks.evidence import Evidence
from harness.checks.outputs import at_index
from harness.checks.registry import CheckResult, register
from harness.contract.answers import Answer, Piece, answers
from harness.contract.batches import Part
from harness.contract.requests import RequestSpec
from harness.contract.trace import RequestEnd
from harness.contract.types import Divergence, Kind, Phase

#: Lists of meta_info that have an entry an output token.
GROWING = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
#: What a request is told in any case, but for one that was aborted before anything was chosen for it.
ALWAYS = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens")
#: Other names that some releases say the same count by.
ALSO = {
    "spec_num_correct_drafts": ("spec_accepted_drafts",),
    "spec_num_proposed_drafts": ("spec_proposed_drafts",),
    "spec_correct_drafts_histogram": ("spec_accept_histogram",),
}


def answered(evidence: Evidence) -> Iterator[tuple[RequestSpec, RequestEnd, Answer]]:
    """Each request that was answered, and how."""
    found, requests = answers(evidence.engine), {request.rid: request for request in evidence.scenario.requests}
    for end in evidence.engine.ends:
        if end.rid in found and end.rid in requests:
            yield requests[end.rid], end, found[end.rid]


def at_token(
    evidence: Evidence, rid: str, index: int, *, kind: Kind, observed: object, expected: object, hint: str
) -> Divergence:
    """A divergence at the token at `index` of a request's text: keyed by the row behind which it stands."""
    prompt = len(evidence.scenario.request(rid).input_ids)
    phase = Phase.PREFILL if index <= prompt else Phase.ACCEPT
    return at_index(evidence, rid, index, phase, kind=kind, expected=expected, observed=observed, hint=hint)


@register(id="counts", kinds=(Kind.SHAPE, Kind.ACCEPT, Kind.TOKEN), reads=("scenario", "engine"))
def check_counts(evidence: Evidence) -> CheckResult:
    """Usage, accept counts and finish reasons that SGLang returns are those of the batches that ran.

    ACCEPT for what is said of verifies, TOKEN for finish reasons, SHAPE for the other counts.
    """
    result = CheckResult()
    for request, end, answer in answered(evidence):
        expected = {**_usage(evidence, request, end), **_finish(end, answer), **_verified(evidence, request, end)}
        for name, value in expected.items():
            for said in (name, *ALSO.get(name, ())):
                if said in answer.meta:
                    result.count("counts", 1)
                due = said in answer.meta or (said in ALWAYS and (end.output_ids or end.reason != "abort"))
                if due and not _same(answer.meta.get(said), value):
                    kind = Kind.ACCEPT if said.startswith("spec_") else Kind.SHAPE
                    kind = Kind.TOKEN if said == "finish_reason" else kind
                    where = len(request.input_ids) + max(0, len(end.output_ids) - 1)
                    result.divergences.append(
                        at_token(
                            evidence,
                            request.rid,
                            where,
                            kind=kind,
                            observed=answer.meta.get(said, "nothing"),
                            expected=value,
                            hint=said.replace("_", "-"),
                        )
                    )
    return result


def _same(said: Any, value: Any) -> bool:
    if isinstance(value, float) and isinstance(said, (int, float)):
        return math.isclose(said, value, rel_tol=1e-9)
    return bool(said == value)


def _usage(evidence: Evidence, request: RequestSpec, end: RequestEnd) -> dict[str, Any]:
    """Tokens read, generated and not computed, and how often it began anew."""
    attempts = evidence.attempts(request.rid)
    found: dict[str, Any] = {"prompt_tokens": len(request.input_ids), "completion_tokens": len(end.output_ids)}
    if not attempts:
        return found  # aborted before it ran
    if evidence.scenario.engine.dp_size > 1:
        found["dp_rank"] = request.dp_rank
    if attempts[0][0].record.mode == "PREFILL":
        found["cached_tokens"] = max(attempts[0][0].start, _on_decode_side(evidence, request.rid))
    if end.reason != "abort" and not evidence.scenario.engine.disaggregation:
        found["num_retractions"] = len(attempts) - 1
    return found


def _on_decode_side(evidence: Evidence, rid: str) -> int:
    """How many tokens a decode side had of a request as it was handed over: what neither side computes is cached."""
    handed = (event.data for event in evidence.engine.named("handed"))
    return next((data["prefixes"][data["rids"].index(rid)] for data in handed if rid in data["rids"]), 0)


def _finish(end: RequestEnd, answer: Answer) -> dict[str, Any]:
    """Where it was a token that ended it, or the length; words of the other reasons are SGLang's own."""
    said = answer.meta.get("finish_reason") or {}
    if end.reason == "length":
        return {"finish_reason": {**said, "type": "length", "length": len(end.output_ids)}}
    if end.reason == "stop" and not isinstance(said.get("matched"), str):
        return {"finish_reason": {**said, "type": "stop", "matched": end.output_ids[-1] if end.output_ids else None}}
    return {}


def _verified(evidence: Evidence, request: RequestSpec, end: RequestEnd) -> dict[str, Any]:
    """What follows from the verifies whose tokens the request has: how many, and how many drafts each accepted."""
    accepted = [_accepted(evidence, request, part) for part in _kept(evidence, request, end)]
    if not accepted or not end.output_ids:
        return {}
    verifies = len(accepted)
    proposed = verifies * (evidence.scenario.spec.num_draft_tokens - 1)
    found = {
        "spec_verify_ct": verifies,
        "spec_num_proposed_drafts": proposed,
        "spec_accept_length": len(end.output_ids) / verifies,
    }
    known = [one for one in accepted if one is not None]
    if len(known) < verifies:
        return found
    return found | {
        "spec_num_correct_drafts": sum(known),
        "spec_accept_rate": sum(known) / proposed,
        "spec_correct_drafts_histogram": [known.count(count) for count in range(max(known) + 1)],
    }


def _accepted(evidence: Evidence, request: RequestSpec, part: Part) -> int | None:
    """Drafts that a verify accepted, those among them that the request's end cut off; None where that was drawn.

    A worker that takes them out of the batch too (v1) counts them as one that does not.
    """
    if not truncated(evidence, part.share):
        return part.length - 1
    whole = (
        walk(evidence, evidence.table.of(part.share, Phase.VERIFY)) if request.greedy and not request.rules else None
    )
    return None if whole is None else len(whole) - 1


def _kept(evidence: Evidence, request: RequestSpec, end: RequestEnd) -> Iterator[Part]:
    """Its verifies, without those of which it has no token: in flight when it ended, or when it was retracted."""
    attempts = evidence.attempts(request.rid)
    if not attempts:
        return
    known = [_known(parts) for parts in attempts[1:]] + [len(request.input_ids) + len(end.output_ids)]
    for parts, most in zip(attempts, known[: len(attempts)], strict=True):  # none of one that never ran
        yield from (part for part in parts if part.record.mode == "DECODE" and part.length and part.start + 1 < most)


def _known(parts: list[Part]) -> int:
    """How many tokens a request had when it began anew; without end where it never did to the end.

    On a decode side it resumes with the KV of all of them but the last.
    """
    for part in parts:
        if part.record.mode == "PREBUILT":
            return part.start + 1
        if part.record.mode == "PREFILL" and part.final:
            return part.start + part.length
    return 2**62


@register(id="streamed", kinds=(Kind.TOKEN, Kind.SHAPE), reads=("scenario", "engine"))
def check_streamed(evidence: Evidence) -> CheckResult:
    """The pieces of a stream grow into the answer: each token and what stands beside it once and in order.

    SHAPE where a piece takes something back, or has more or less beside its tokens; TOKEN where it differs.
    """
    result = CheckResult()
    for request, end, answer in answered(evidence):
        if not request.stream:
            continue
        if not answer.pieces:
            result.unknown.append(f"stream of {request.rid} not judged: it came in no pieces")
            continue
        result.count("counts", len(answer.pieces))
        whole = Piece(output_ids=end.output_ids, meta=answer.meta)
        faults = [fault for piece, after in pairwise((*answer.pieces, whole)) for fault in _broken(piece, after)]
        faults += _spaced(evidence, request, answer)
        verifies = sum(part.record.mode == "DECODE" for part in evidence.parts_of(request.rid))
        if (request.stream_interval or 1) > 1 and not _sent(evidence, request.rid) and verifies > 2:
            result.unknown.append(f"interval of the stream of {request.rid} not judged: nothing says what was sent")
        for place, (hint, observed, expected) in faults:
            index = len(request.input_ids) + place
            kind = Kind.TOKEN if hint == "piece-other-token" else Kind.SHAPE
            found = at_token(evidence, request.rid, index, kind=kind, observed=observed, expected=expected, hint=hint)
            result.divergences.append(found)
    return result


def _spaced(
    evidence: Evidence, request: RequestSpec, answer: Answer
) -> Iterator[tuple[int, tuple[str, object, object]]]:
    """As `_broken`: a piece that comes before its interval is full, and one that does not come when it is.

    SGLang's rule: the first token at once, then whenever as many are unsent. A text that may be the beginning of a stop
    string waits for what follows.
    """
    interval = request.stream_interval or 1
    counts = [len(piece.output_ids) for piece in answer.pieces[:-1]]
    for before, after in pairwise(counts):
        if 0 < after - before < interval:
            yield after - 1, ("piece-early", after - before, f"{interval} tokens")
    for sent, known in _sent(evidence, request.rid):
        if known - sent >= interval and not request.ends_by_text:
            yield known - 1, ("piece-late", f"{known - sent} tokens unsent", f"fewer than {interval}")


def _sent(evidence: Evidence, rid: str) -> list[tuple[int, int]]:
    """Tokens that left for the client, and all that there were, at each step in which the probe saw it."""
    turns = (event.data.get("sent", {}) for event in evidence.engine.named("turn"))
    return [(int(sent[rid][0]), int(sent[rid][1])) for sent in turns if rid in sent]


def _broken(piece: Piece, after: Piece) -> Iterator[tuple[int, tuple[str, object, object]]]:
    """(output number, (hint, observed, expected)) of what of a piece is not in the next one, or beside no token."""
    count = len(piece.output_ids)
    both = zip(piece.output_ids, after.output_ids, strict=False)
    other = next((place for place, (mine, theirs) in enumerate(both) if mine != theirs), None)
    if other is not None:
        yield other, ("piece-other-token", piece.output_ids[other], after.output_ids[other])
    elif count > len(after.output_ids):
        yield len(after.output_ids), ("piece-taken-back", count, len(after.output_ids))
    if piece.meta.get("completion_tokens", count) != count:
        yield max(0, count - 1), ("piece-count", piece.meta["completion_tokens"], count)
    for name in GROWING:
        mine, theirs = piece.meta.get(name), after.meta.get(name)
        if mine is None or theirs is None:
            continue
        if len(mine) != count:
            yield min(count, len(mine)), (f"piece-{name.replace('_', '-')}", len(mine), count)
        elif mine != theirs[:count]:
            at = next(place for place in range(count) if mine[place : place + 1] != theirs[place : place + 1])
            yield at, ("piece-changed", mine[at], theirs[at] if at < len(theirs) else "nothing")
    if (
        piece.meta.get("input_token_logprobs")
        and piece.meta["input_token_logprobs"] != after.meta["input_token_logprobs"]
    ):
        yield (
            0,
            ("piece-input-changed", len(piece.meta["input_token_logprobs"]), len(after.meta["input_token_logprobs"])),
        )
