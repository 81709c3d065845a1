"""Says what a scenario asked for that nothing judged: that is UNKNOWN, never a PASS.

A key of a request is added to JUDGED by the change that judges it. This module must not judge by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.checks.evidence import Evidence

#: Keys of requests whose effect a check holds against a rule.
JUDGED = frozenset(
    ("rid", "input_ids", "max_new_tokens", "temperature", "sampling_seed", "stop_token_ids", "ignore_eos", "priority")
) | {"dp_rank", "expect"}


def not_judged(evidence: Evidence) -> Iterator[str]:
    """Reasons for UNKNOWN."""
    yield from not_given(evidence.engine.header)
    for request in evidence.scenario.requests:
        for key in request.asked:
            if key not in JUDGED:
                yield f"request {request.rid} asks for {key}, which nothing judges"


def not_given(header: Mapping[str, Any]) -> Iterator[str]:
    """Settings that the engine was started with and does not run; a trace of before this was recorded has none."""
    given, asked = header.get("given") or {}, header.get("asked") or {}
    for name, value in asked.items():
        if name in given and not _same(name, value, given[name], page=int(given.get("page_size") or 1)):
            yield f"asked for {name} {value}, and the engine runs with {given[name]}"


def _same(name: str, asked: Any, given: Any, *, page: int) -> bool:
    return bool(asked // page * page == given if name == "max_total_tokens" else asked == given)


def not_published(header: Mapping[str, Any]) -> Iterator[str]:
    """What a verdict about a release must say of an engine that is not quite it."""
    if files := header.get("changed_files"):
        yield f"SGLang {header.get('release')} is not as published: {', '.join(files[:3])}" + (
            f" and {len(files) - 3} more files" if len(files) > 3 else ""
        )
