"""Text for one divergence: what, where, observed and expected values, and the meaning.

This module must not decide anything, and must not know where a run is stored.
"""

from __future__ import annotations

import math
from typing import Any

from harness.checks.findings import READING, Finding
from harness.contract.scenario import Scenario
from harness.contract.types import LAYERED, Divergence, Kind, Phase, Policy
from harness.contract.words import percent

SUBJECT: dict[str, str] = {
    Phase.PREFILL: "target prefill",
    Phase.DRAFT_PREFILL: "draft prefill",
    Phase.DRAFT: "draft",
    Phase.VERIFY: "verify",
    Phase.ACCEPT: "accept",
    Phase.EXTEND: "draft extend",
    Phase.IDLE: "idle",
    Phase.PREBUILT: "prebuilt batch",
}

WHAT: dict[Kind, str] = {
    Kind.TOKEN: "token differs",
    Kind.POSITION: "position differs",
    Kind.PARENT: "parent differs",
    Kind.ACCEPT: "walk differs",
    Kind.EXTEND_INPUT: "input is not the next token",
    Kind.CACHE_SLOT: "cache slot is wrong",
    Kind.NUMERIC: "values differ",
    Kind.STATE: "recurrent state differs",
    Kind.SHAPE: "shape differs",
    Kind.MISSING_ROW: "row is missing",
    Kind.EXTRA_ROW: "row is unexpected",
    Kind.LOCKSTEP: "forwards differ between ranks",
    Kind.LEAK: "pool level differs",
    Kind.CRASH: "engine crashed",
    Kind.HANG: "engine hangs",
    Kind.NONDETERMINISM: "two runs differ",
}

#: Checks whose findings are about a request as a whole, not about a row.
TITLES = {
    "finish": "output ends in the wrong place",
    "admission": "request is not served as it should be",
    "aborts": "output of an aborted request goes on",
    "retraction": "another request should go back to the queue",
}

#: Plain words for hints that a stranger would not understand.
RELATION: dict[str, str] = {
    "token-late": "the state of a shorter text of this request",
    "token-early": "the state of a longer text of this request",
    "refused-kept": "the state of this text and a token that was refused",
    "neighbours-state": "the state of another request",
    "state-zeros": "all zeros",
    "one-ahead": "one ahead",
    "one-behind": "one behind",
    "chunk-tail": "last row of a non-final chunk; the next prompt token was already known",
    "chunk-tail-target-guess": (
        "last row of a non-final chunk: the target's own guess for that place, although the prompt token was known"
    ),
    "chunk-tail-proposal": (
        "last rows of a non-final chunk: what an earlier layer proposed, although the prompt token was known"
    ),
    "final-tail": "last row of the final chunk",
    "not-rotated": "the row's own token: the input was not rotated",
    "rotated-twice": "the token after the next: rotated twice",
    "hidden_in-previous-row": "equals the reference's previous row",
    "hidden_out-as-handed-over": "the one that this request first arrived with",
    "hidden_in-next-row": "equals the reference's next row",
    "hidden_in-zeros": "all zeros",
    **{f"{side}-own-other-row": "another row of this request in this batch" for side in ("hidden_in", "hidden_out")},
    **{f"{side}-neighbours-row": "a row of another request of this batch" for side in ("hidden_in", "hidden_out")},
    "hidden_in-own-state-of-another-round": "the state that this request had in another round",
    **{f"hidden_in-feature-{n}": f"feature {n} of three is off, the others are right" for n in range(3)},
    "choice-runner-up": "the reference's neighbouring choice, but not within a tie",
    "choice-outside-top": "not among the reference's recorded top logits",
    "owned-by-another": "the slot belongs to another live request",
    "shared-with-another": "two requests of one batch write this slot",
    "own-slot-again": "the request overwrites its own committed row",
    "out-of-page": "another place in its page than the position, so whoever reads page by page misses it",
    "plan-of-step-before": "what the step before was to read",
    "changed-since-written": "nobody wrote there since",
    "one-slot-late": "the whole window lies one slot late",
    "one-slot-early": "the whole window lies one slot early",
    "rows-of-own-number": "the rows of its own number, not those of the beams it grew from",
    "rows-of-other-beams": "the rows of beams that it did not grow from",
    "of-another-beam": "another beam's row in the place of its own",
    "of-another-node": "another node's row in the place of its own",
    "rows-of-round-elsewhere": "the committed rows are right, those of this round are not",
    "prefix-elsewhere": "not the rows that this request keeps",
    "draft-slot-differs": "draft and target write different slots for one position",
    "too-many": "more than the walk or batch allows",
    "too-few": "fewer than the walk allows",
    "ran-past-stop": "tokens after the stop token",
    "ran-past-length": "tokens, against max_new_tokens",
    "aborted-ran-past-stop": "tokens after the stop token; the request was aborted",
    "aborted-ran-past-length": "tokens, against max_new_tokens; the request was aborted",
    "stopped-early": "tokens, against max_new_tokens",
    "text-length": "tokens of output",
    "idle-width": "an idle rank carries states of another width",
    "aborted-queued": "tokens; it had not begun when it was aborted",
    "aborted-in-chunk": "tokens; its prompt was not read to the end when it was aborted",
    "aborted-retracted": "tokens; it waited to come back when it was aborted",
    "aborted-decoding": "tokens; more than those of the one pass that SGLang lets it run",
    "longer-output-taken-back": "the other one has written less",
    "lost": "slots were not freed",
    "freed-twice": "more slots were freed than allocated",
    "instead-freed-twice": "slots that are free twice, or free and cached, in place of as many that are lost",
}


def describe(divergence: Divergence, scenario: Scenario, *, finding: Finding | None = None) -> str:
    """Several lines, no trailing newline. With its finding, also how often and what explains it."""
    lines = [f"{_title(divergence)}: {_where(divergence, scenario)}", f"  {_values(divergence)}"]
    if divergence.policy is Policy.TIE and divergence.margin is not None and math.isfinite(divergence.margin):
        lines.append(f"  reference margin between the two: {divergence.margin:.3g}")
    if finding is not None:
        lines += _elsewhere(divergence, finding)
    if divergence.cause:
        lines.append(f"  follows from {divergence.cause}")
    return "\n".join(lines)


def _title(divergence: Divergence) -> str:
    if divergence.check == "cached":
        return f"{SUBJECT[divergence.key.phase]} attention reads a cached row that has changed"
    if divergence.check in READING:
        return f"{SUBJECT[divergence.key.phase]} attention reads other cache slots"
    if divergence.kind in (Kind.LEAK, Kind.CRASH, Kind.HANG):
        return WHAT[divergence.kind]
    if title := TITLES.get("finish" if divergence.hint == "text-length" else divergence.check):
        return title
    return f"{SUBJECT.get(divergence.key.phase, divergence.key.phase)} {WHAT[divergence.kind]}"


def _where(divergence: Divergence, scenario: Scenario) -> str:
    key = divergence.key
    words = [f"request {key.rid} on DP rank {key.dp_rank}" if key.rid else f"DP rank {key.dp_rank}"]
    if key.committed >= 0:
        words.append(f"committed length {key.committed}")
    if key.attempt:
        words.append(f"after retraction {key.attempt}")
    if divergence.round >= 0:
        words.append(f"round {divergence.round}")
    if key.rid and key.committed >= 0:
        words.append(_place(divergence, scenario))
    return ", ".join(words)


def _place(divergence: Divergence, scenario: Scenario) -> str:
    key = divergence.key
    if key.phase == Phase.DRAFT:
        beam = f", beam {key.slot} of {scenario.spec.eagle_topk}" if scenario.spec.eagle_topk > 1 else ""
        return f"draft step {key.step} of {scenario.spec.num_steps - 1}{beam}"
    if key.phase == Phase.VERIFY:
        return f"tree node {key.slot} of {scenario.spec.num_draft_tokens}"
    if key.phase == Phase.ACCEPT:
        return f"committed token {key.slot}"
    if scenario.spec.layers > 1 and key.phase in LAYERED:
        return f"layer {key.step} of {scenario.spec.layers}, row {key.slot}"
    return f"row {key.slot}"


def _values(divergence: Divergence) -> str:
    if divergence.kind is Kind.NUMERIC and isinstance(divergence.observed, dict):
        return _numeric(divergence.observed, divergence.expected, divergence.hint)
    relation = RELATION.get(divergence.hint, divergence.hint.replace("-", " "))
    truth = "reference" if divergence.check in ("chain", "verify", "extend", "losslessness", "align") else "expected"
    text = f"engine {divergence.observed}, {truth} {divergence.expected}"
    return f"{text} ({relation})" if relation else text


def _numeric(observed: dict[str, Any], expected: Any, hint: str) -> str:
    """The vocabulary of torch.testing.assert_close."""
    total = int(observed.get("of", 0))
    wrong = int(observed.get("mismatched", 0))
    limit = expected.get("limit_abs") if isinstance(expected, dict) else expected
    relation = RELATION.get(hint, hint.replace("-", " "))
    return (
        f"mismatched elements: {wrong} / {total} ({percent(wrong, total, 1)}); {relation}\n"
        f"  greatest absolute difference: {observed.get('greatest_abs')} at index {observed.get('at')} "
        f"(up to {limit} allowed)\n"
        f"  greatest relative difference: {observed.get('greatest_rel')} of the row's greatest value"
    )


def _requests(finding: Finding) -> str:
    return f"request{'s' if len(finding.rids) > 1 else ''} {', '.join(finding.rids)}"


def _elsewhere(divergence: Divergence, finding: Finding) -> list[str]:
    lines = []
    if finding.count > 1:
        first = finding.first
        here = first.key == divergence.key and first.round == divergence.round
        place = "this is the first" if here else f"the first is round {first.round}, step {first.key.step}"
        lines.append(f"  {finding.count - 1} more in this scenario; {place}; {_requests(finding)}")
    lines.append(f"  signature {finding.signature}")
    return lines
