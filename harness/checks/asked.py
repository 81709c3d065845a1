"""Says what a scenario asked for that did not happen or was not judged: that is UNKNOWN, never a PASS.

Keys of requests that nothing judges, settings that the engine does not run, files that are not its release's, rows that
a witness did not see. A key of a request is added to JUDGED by the change that judges it. This module must not judge by
itself: it can only keep a PASS from being empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.checks.evidence import Evidence
from harness.contract.answers import answers
from harness.contract.providers import LIMITS, NOT_COMPARED, is_witness, witnessed_in
from harness.contract.requests import ADJUSTING, CUTTING, RequestSpec
from harness.contract.words import counted

#: Keys of requests whose effect a check holds against a rule.
JUDGED = frozenset(
    (
        *("rid", "input_ids", "max_new_tokens", "temperature", "sampling_seed", "stop_token_ids", "ignore_eos"),
        *("priority", "dp_rank", "lora_path", "expect", "unlimited", "input_embeds", *ADJUSTING, *CUTTING),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
        *("return_hidden_states", "stream", "stream_interval", "n"),
        *("stop", "stop_regex", "no_stop_trim", "json_schema", "regex", "ebnf", "require_reasoning"),
    )
)

#: Files that a verdict names.
NAMED = 3
#: By what SGLang multiplies `schedule_conservativeness` under DP attention (its arguments' parallel_hook).
OF_DP_ATTENTION = 0.3
#: Those that ask for more than tokens.
RETURNED = ("return_logprob", "return_hidden_states", "stream")


def not_judged(evidence: Evidence) -> Iterator[str]:
    """Reasons for UNKNOWN."""
    windows = list(evidence.engine.named("window"))
    if not (evidence.scenario.engine.disable_hybrid_swa_memory or windows):
        yield "engine.disable_hybrid_swa_memory is false, and the engine has no pool for sliding windows"
    known = evidence.reference is None or not is_witness(evidence.reference.header)
    for request in evidence.scenario.requests:
        for key in request.asked:
            if key == "custom_params" and request.custom_logit_processor:
                continue
            if key not in JUDGED:
                yield f"request {request.rid} asks for {key}, which nothing judges"
            elif key in request.rules and not known:
                yield f"request {request.rid} asks for {key}, and a witness knows too few logits to follow it"
        yield from _unordered(request)
        yield from _unanswered(evidence, request)
    yield from _accepting(evidence)
    for event in evidence.engine.named("update", "memory"):
        if not event.data["success"]:
            yield f"op {event.name} {event.data['what']!r} did not succeed; SGLang says: {event.data['message']}"


#: What a sampled verify is made with beside its uniforms, and what SGLang takes where nothing is said.
THRESHOLDS = {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}


def _accepting(evidence: Evidence) -> Iterator[str]:
    """Thresholds that sampled verifies did not run with, and another rule for them."""
    arguments = evidence.scenario.engine.server_args
    asked = [float(arguments.get(name, usual)) for name, usual in THRESHOLDS.items()]
    found = {tuple(event.data["thresholds"]) for event in evidence.engine.named("uniforms")}
    for ran in sorted(found - {tuple(asked)}):
        yield f"asked for {' and '.join(THRESHOLDS)} {asked}, and a verify ran with {list(ran)}"
    if found and arguments.get("speculative_use_block_verification"):
        yield "speculative_use_block_verification accepts drawn tokens by a rule that nothing judges"


def _unordered(request: RequestSpec) -> Iterator[str]:
    """Keys whose order decides, where no source says which comes first."""
    added = [key for key in ("frequency_penalty", "presence_penalty", "logit_bias") if key in request.rules]
    if added and "repetition_penalty" in request.rules:
        yield (
            f"request {request.rid} asks for repetition_penalty beside {', '.join(added)}: no source says whether it "
            "scales a logit before or after that is added"
        )


def _unanswered(evidence: Evidence, request: RequestSpec) -> Iterator[str]:
    """What was to come back of a request that ended, where the trace holds nothing of it."""
    ended = any(end.rid == request.rid and end.reason != "error" for end in evidence.engine.ends)
    returned = [key for key in RETURNED if key in request.asked]
    if ended and returned and request.rid not in answers(evidence.engine):
        yield f"request {request.rid} asks for {returned[0]}, and the trace does not say what came back"


def not_given(header: Mapping[str, Any]) -> Iterator[str]:
    """Reasons for UNKNOWN: settings that the engine was started with and does not run.

    A trace of before this was recorded has none.
    """
    given, asked = header.get("given") or {}, header.get("asked") or {}
    page, ranks = int(given.get("page_size") or 1), int(given.get("dp_size") or 1)
    for name, value in asked.items():
        if name in given and not _same(name, value, given[name], page=page, ranks=ranks):
            yield f"asked for {name} {value}, and the engine runs with {given[name]}"


def _same(name: str, asked: Any, given: Any, *, page: int, ranks: int) -> bool:
    """A pool holds whole pages; under DP attention SGLang reserves by its own share of what was asked."""
    if name == "max_total_tokens":
        return bool(asked // page * page == given)
    if name == "schedule_conservativeness" and ranks > 1:
        return math.isclose(asked * OF_DP_ATTENTION, given)
    return bool(asked == given)


def not_published(header: Mapping[str, Any]) -> Iterator[str]:
    """What a verdict about a release must say of an engine that is not quite it."""
    if files := header.get("changed_files"):
        more = f" and {counted(len(files) - NAMED, 'more file')}" if len(files) > NAMED else ""
        yield f"SGLang {header.get('release')} is not as published: {', '.join(files[:NAMED])}{more}"


def witnessed(evidence: Evidence) -> tuple[list[str], list[str]]:
    """(reasons for UNKNOWN, what to say) where a witness stood in for a reference."""
    if evidence.reference is None or not is_witness(evidence.reference.header):
        return [], []
    seen = witnessed_in(evidence.reference.header)
    unknown = [f"nothing compared: no {name} row has a witness" for name, (known, _) in seen.rows.items() if not known]
    notes = [LIMITS]
    notes += [
        f"{NOT_COMPARED}: {name} rows without a witness" for name, (known, of) in seen.rows.items() if 0 < known < of
    ]
    notes += [f"{NOT_COMPARED}: {fault}" for fault in seen.faults]
    if any(not request.greedy for request in evidence.scenario.requests):
        notes.append(f"{NOT_COMPARED}: what is accepted at a temperature, since a witness knows no probabilities")
    return unknown, notes
