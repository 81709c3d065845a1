"""What the generated tests share: a block of scenarios driven on the live engine, and the report of what it found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from cases.hunt import Hunt
from harness.checks.describe import describe
from harness.contract.types import Scenario
from harness.search.shrink import Budget, Step

#: What making one finding small may cost in a test; `eaglecheck replay` can go on from there.
SHRINKING = Budget(seconds=45.0, restarts=2, tries=120)


def drive_all(hunt: Hunt, scenarios: Sequence[Scenario], *, seconds: float) -> int:
    """Drive them until the time is spent; returns how many were left out."""
    start = time.monotonic()
    for number, scenario in enumerate(scenarios):
        if time.monotonic() - start > seconds:
            return len(scenarios) - number
        hunt.drive(scenario)
    return 0


def report(hunt: Hunt) -> str:
    """Every root finding with its count, its first divergence, and the smallest scenario that shows it."""
    parts = []
    for found in hunt.findings():
        if found.consequence:
            continue
        steps: list[Step] = []
        shrunk, folder = hunt.shrink(found, budget=SHRINKING, progress=steps.append)
        small = shrunk.scenario
        parts.append(
            f"{found.signature}: {found.divergences} divergences in {found.scenarios} scenarios\n"
            f"{describe(found.first, found.smallest)}\n"
            f"  shrunk in {shrunk.tries} tries to {len(small.requests)} request(s), "
            f"{sum(len(request.prompt) for request in small.requests)} prompt tokens, {len(small.script)} ops\n"
            f"  run again:  eaglecheck replay {folder}"
        )
    parts += [f"not judged: {reason} ({count} scenarios)" for reason, count in hunt.unknown.items()]
    return "\n".join(parts)


def runs() -> Path:
    from harness.cli import prepare

    return Path.cwd() / prepare.runs_root(None)
