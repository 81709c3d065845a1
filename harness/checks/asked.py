"""Says what a scenario asked for that nothing judged: that is UNKNOWN, never a PASS.

A key of a request is added to JUDGED by the change that judges it. This module must not judge by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.evidence import Evidence
from harness.contract.answers import answers

#: Keys of requests whose effect a check holds against a rule.
JUDGED = frozenset(
    (
        *("rid", "input_ids", "max_new_tokens", "temperature", "sampling_seed", "stop_token_ids", "ignore_eos"),
        *("priority", "dp_rank"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
        *("return_hidden_states", "stream"),
    )
)

#: Those that ask for more than tokens.
RETURNED = ("return_logprob", "return_hidden_states", "stream")


def not_judged(evidence: Evidence) -> Iterator[str]:
    """Reasons for UNKNOWN."""
    told = answers(evidence.engine)
    ends = {end.rid for end in evidence.engine.ends if end.reason != "error"}
    for request in evidence.scenario.requests:
        if returned := [key for key in RETURNED if key in request.asked and request.rid in ends - set(told)]:
            yield f"request {request.rid} asks for {returned[0]}, and the trace does not say what came back"
        for key in request.asked:
            if key not in JUDGED:
                yield f"request {request.rid} asks for {key}, which nothing judges"
