"""Checks of what grammars allow and of where texts end, against what the reference says of them.

The reference's events (see reference.constraints): 'allowed' holds one bit a token for each row that chooses, 'written'
where an output ends by its stop strings and patterns and what comes back of it, 'unread' why a grammar has no second
opinion. The engine's: 'masks' as its grammars filled them, 'text' as it came back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.outputs import at_output
from harness.checks.registry import CheckResult, register
from harness.checks.set_aside import errors
from harness.contract.batches import Share, share_of, shares_of
from harness.contract.requests import GRAMMARS, RequestSpec
from harness.contract.trace import EOS, Event, RequestEnd
from harness.contract.types import Divergence, Kind, Phase

Bits = np.ndarray


@register(id="grammar", kinds=(Kind.TOKEN,), reads=("scenario", "engine", "reference"))
def check_grammar(evidence: Evidence) -> CheckResult:
    """What a grammar allows is asked at every node of the tree, and nothing else is committed.

    TOKEN at rows that chose what their grammar does not allow, and at those whose mask is not its tokens.
    """
    result, masks, refused = CheckResult(), _masks(evidence), errors(evidence)
    for event in evidence.truth.events:
        if event.name == "unread":
            if event.data["rid"] not in refused:  # they have their reason
                result.unknown.append(f"the grammar of {event.data['rid']} is not judged: {event.data['why']}")
        elif event.name == "allowed":
            share = share_of(event)
            allowed = [None if bits is None else _bits(bits) for bits in event.data["bits"]]
            _judge_choices(evidence, share, Phase(event.data["phase"]), allowed, result)
            if any(one is not None for one in allowed):
                own = masks.get((*share, event.data["phase"]))
                _judge_masks(evidence, share, event, own, result)
    result.unknown = list(dict.fromkeys(result.unknown))
    return result


def _judge_choices(
    evidence: Evidence, share: Share, phase: Phase, allowed: list[Bits | None], result: CheckResult
) -> None:
    """The first choice on the way that was taken which is not allowed."""
    table, taken = evidence.table, list[tuple[int, int, int]]()
    if phase is Phase.PREFILL and (rows := table.of(share, Phase.PREFILL)):
        taken = [(rows[-1], 0, table.chosen(rows[-1])[0])] if table.chosen(rows[-1]) else []
    elif phase is Phase.VERIFY:
        taken = [(row, table.ints["parent"][row], table.ints["input_id"][row]) for row in table.of(share, Phase.ACCEPT)]
    for row, node, token in taken:
        bits = allowed[node] if 0 <= node < len(allowed) else None
        if bits is None:
            return
        result.count("tokens", 1)
        if not bits[token]:
            ends = token in evidence.engine.header.get(EOS, ())
            hint = "ends-too-early" if ends else "not-allowed"
            result.divergences.append(
                evidence.divergence(
                    row, kind=Kind.TOKEN, expected=f"one of {int(bits.sum())} tokens", observed=token, hint=hint
                )
            )
            return


def _judge_masks(evidence: Evidence, share: Share, event: Event, own: list[str] | None, result: CheckResult) -> None:
    """Every row's mask, but for tokens that stand for something else than their text."""
    phase = Phase(event.data["phase"])
    rows = evidence.table.of(share, phase)
    if own is None:
        result.unknown.append(f"masks of {share[1]} in {phase} not judged: the probe saw none")
        return
    rows = rows[-1:] if phase is Phase.PREFILL else rows
    for row, wanted, seen in zip(rows, event.data["bits"], own, strict=False):
        if wanted is None:
            continue
        expected = _bits(wanted)
        observed = _bits(seen)[: len(expected)]
        same = expected == observed
        same[event.data["unspelled"]] = True
        result.count("masks", 1)
        if not same.all():
            token = int(np.flatnonzero(~same)[0])
            result.divergences.append(
                evidence.divergence(
                    row,
                    kind=Kind.TOKEN,
                    expected=f"token {token} {'allowed' if expected[token] else 'not allowed'}",
                    observed=f"the opposite, and of {int((~same).sum()) - 1} more",
                    hint="mask-too-narrow" if expected[token] else "mask-too-wide",
                )
            )


def _masks(evidence: Evidence) -> dict[tuple[Any, ...], list[str]]:
    """The engine's own: by share and phase, one a row."""
    return {
        (*share, event.data["phase"]): bits
        for event in evidence.engine.named("masks")
        for share, bits in shares_of(event, "bits")
    }


def _bits(text: str) -> Bits:
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8), bitorder="little").astype(bool)


@register(id="texts", kinds=(Kind.TOKEN,), reads=("scenario", "engine", "reference"))
def check_texts(evidence: Evidence) -> CheckResult:
    """A text ends with the first token after which it holds a stop string, and comes back as it was asked for.

    TOKEN where an output runs past its stop string, ends without one, or comes back as another text.
    """
    result = CheckResult()
    written = {event.data["rid"]: event.data for event in evidence.truth.named("written")}
    answers = {event.data["rid"]: event.data for event in evidence.engine.named("text")}
    result.unknown = [
        f"the text of {request.rid} is not judged: the reference has no tokenizer"
        for request in evidence.scenario.requests
        if request.rid not in written and (request.ends_by_text or set(request.rules) & {*GRAMMARS})
    ]
    for end in evidence.engine.ends:
        if end.rid in written and end.reason in ("stop", "length") and end.rid in answers:
            result.count("tokens", len(end.output_ids))
            request = evidence.scenario.request(end.rid)
            result.divergences += _faults(evidence, request, end, written[end.rid], answers[end.rid])
    return result


def _faults(
    evidence: Evidence, request: RequestSpec, end: RequestEnd, written: dict[str, Any], answer: dict[str, Any]
) -> Iterator[Divergence]:
    stop, length = written["length"], len(end.output_ids)
    ids = request.stops(evidence.engine.header.get(EOS, ()))
    by_token = length > 0 and end.output_ids[-1] in ids
    if stop is not None and stop < length:
        hint = "tokens-behind-stop-string" if end.reason == "stop" and not by_token else "stop-string-missed"
        yield at_output(evidence, end, stop, length - stop, 0, hint)
    elif end.reason == "stop" and stop != length and not by_token:
        yield at_output(evidence, end, length - 1, "no stop", "a stop string or token", "stopped-without-stop")
    elif end.reason == "length" and stop == length:
        yield at_output(evidence, end, length - 1, "length", "stop", "stop-string-not-said")
    elif stop == length and not by_token and answer["matched"] not in written["matched"]:
        yield at_output(evidence, end, length - 1, answer["matched"], written["matched"], "matched-another")
    elif answer["text"] != written["text"]:
        yield at_output(evidence, end, length - 1, answer["text"], written["text"], "text")
