"""Says what a scenario asked for that nothing judged: that is UNKNOWN, never a PASS.

A key of a request is added to JUDGED by the change that judges it. This module must not judge by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.evidence import Evidence
from harness.contract.answers import answers
from harness.contract.providers import is_witness
from harness.contract.requests import ADJUSTING, CUTTING, RequestSpec

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
    found = {tuple(event.data["thresholds"]) for event in evidence.engine.named("coins")}
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
