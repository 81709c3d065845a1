"""Says where an engine is not the one that was asked for: settings it does not run, files that are not its release's.

It must not judge what the engine did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.contract.words import counted

#: Files that a verdict names.
NAMED = 3
#: By what SGLang multiplies `schedule_conservativeness` under DP attention (its arguments' parallel_hook).
OF_DP_ATTENTION = 0.3


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
