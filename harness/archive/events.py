"""What engine.jsonl says, as far as it can be read: a run that was cut off has half a line. It must not complain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.archive.run_folders import EVENTS
from harness.contract import plain_files


def events(run: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Those of this kind, in the order in which they were written; none without a file."""
    try:
        lines = plain_files.content(run / EVENTS).decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if f'"{kind}"' in line and (found := as_object(line)).get("event") == kind:
            yield found


def driven(run: Path) -> list[str]:
    """The names of a run's scenario folders, in the order in which the scenarios were driven."""
    return [f"{one.get('name')}-{one.get('id')}" for one in events(run, "scenario")]


def as_object(text: str) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
