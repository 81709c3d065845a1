"""Rows of which the reference says that their routing was a tie: counted like ties of tokens.

The reference's event 'routing' names its rows that a run with near ties turned around explains, where its first answer
did not, and how many choices of its routers rounding turns around, as expected (see `driving.routed`).
"""

from __future__ import annotations

from typing import Any

from harness.checks.evidence import Evidence
from harness.checks.registry import Tie


def routing_ties(evidence: Evidence) -> list[Tie]:
    """One for each token whose rows went to other experts: what later rows of it are follows."""
    if not (said := _said(evidence)):
        return []
    assert evidence.reference is not None
    rows, found = evidence.reference.rows, dict[tuple[str, int], Tie]()
    for row in said["rows"]:
        key, token = rows.key(row), int(rows.ints["input_id"][row])
        tie = Tie(key=key, round=int(rows.ints["round"][row]), expected=token, observed=token, margin=0.0, limit=0.0)
        found.setdefault((key.rid, int(rows.ints["position"][row])), tie)
    return list(found.values())


def usual_routing(evidence: Evidence) -> float:
    """How many of these ties rounding makes."""
    return float(_said(evidence).get("usual", 0.0))


def _said(evidence: Evidence) -> dict[str, Any]:
    events = () if evidence.reference is None else evidence.reference.named("routing")
    return next((event.data for event in events), {})
