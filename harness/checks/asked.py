"""Says what a scenario asked for that nothing judged: that is UNKNOWN, never a PASS.

A key of a request is added to JUDGED by the change that judges it. This module must not judge by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.evidence import Evidence

#: Keys of requests whose effect a check holds against a rule.
JUDGED = frozenset(
    ("rid", "input_ids", "max_new_tokens", "temperature", "sampling_seed", "stop_token_ids", "ignore_eos", "priority")
) | {"dp_rank"}


def not_judged(evidence: Evidence) -> Iterator[str]:
    """Reasons for UNKNOWN."""
    for request in evidence.scenario.requests:
        for key in request.asked:
            if key not in JUDGED:
                yield f"request {request.rid} asks for {key}, which nothing judges"
