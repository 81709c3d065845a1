"""What tests ask of a verdict without a reference. This module must not build traces: that is `handmade`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.checks import group, judge
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace


def roots(scenario: Scenario, engine: Trace) -> dict[tuple[str, str, str, str], int]:
    """(kind, check, phase, hint) -> count of root findings without a reference."""
    _, divergences = judge(scenario, engine, None)
    return {
        (str(f.first.kind), f.first.check, f.first.key.phase, f.first.hint): f.count
        for f in group(divergences)
        if f.is_root
    }


def with_round(engine: Trace, number: int, **changes: Any) -> Trace:
    """The trace with one batch record changed."""
    rounds = list(engine.rounds)
    rounds[number] = replace(rounds[number], **changes)
    return replace(engine, rounds=tuple(rounds))
