"""How many ties there are, and how many rounding makes: far more than that are a finding of their own.

A reference may say of rows that their routing was a tie: its event 'routing' names those that a run with near ties
turned around explains, where its first answer did not, and how many choices of its routers rounding turns around, as
expected (see `driving.routed`). They count like ties of tokens.
"""

from __future__ import annotations

import math
from typing import Any

from harness.checks.accepts import noise_of, reach, tie_margin
from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, Tie
from harness.contract.measured import usual_ties
from harness.contract.noise import ALLOWANCE, DIFFERENCE
from harness.contract.tolerance import budget_for, too_many_ties
from harness.contract.types import Divergence, Kind, Phase, Policy


def tie_rate(evidence: Evidence, result: CheckResult) -> list[Divergence]:
    """One TOKEN when ties are too many to be chance."""
    usual = _usual(evidence, result)
    if not result.ties or not too_many_ties(ties=len(result.ties), usual=usual):
        return []
    first = result.ties[0]
    return [
        Divergence(
            kind=Kind.TOKEN,
            check="ties",
            key=first.key,
            round=first.round,
            expected=f"about {usual:.1f} ties of {result.choices} choices",
            observed=f"{len(result.ties)} of {result.choices}",
            policy=Policy.TIE,
            margin=first.margin,
            hint="tie-rate",
        )
    ]


def _usual(evidence: Evidence, result: CheckResult) -> float:
    """As many as rounding turns around among the margins that the reference sees; by a table where none is measured.

    What a tree selects compares paths, whose margins nobody kept: there the table has its say too.
    """
    topk = evidence.scenario.spec.eagle_topk
    known = budget_for(evidence.dtype_in(Phase.DRAFT)).tie_rate(topk) * result.choices
    if evidence.reference is None or evidence.aligned is None:
        return known
    found = usual_ties(evidence.reference, evidence.logit_noise, evidence.aligned.reference)
    beside = usual_draws(evidence) + _usual_routing(evidence)
    return beside + (known if found is None else found if topk == 1 else max(found, known))


def usual_draws(evidence: Evidence) -> float:
    """How many draws rounding turns around, as expected, by how near each came to the end of an interval.

    Of a flat distribution over many tokens every interval is narrow, and a draw falls either way half the time. What is
    nearer than a limit may be a tie; a limit is four standard deviations.
    """
    found = 0.0
    for event in evidence.truth.named("sampled", "ruled"):
        if not evidence.scenario.request(event.data["rid"]).greedy:
            data = event.data
            away = float(data["margin"]) / (tie_margin(evidence, data) / 4)
            if "spread" in data:
                away = max(away, reach(data) / (ALLOWANCE * DIFFERENCE * noise_of(evidence, data["rid"])))
            found += math.erfc(away / math.sqrt(2)) / 2
    return found


def routing_ties(evidence: Evidence) -> list[Tie]:
    """One for each token whose rows went to other experts: what later rows of it are follows."""
    if not (said := _said(evidence)):
        return []
    rows, found = evidence.truth.rows, dict[tuple[str, int], Tie]()
    for row in said["rows"]:
        key, token = rows.key(row), int(rows.ints["input_id"][row])
        tie = Tie(key=key, round=int(rows.ints["round"][row]), expected=token, observed=token, margin=0.0, limit=0.0)
        found.setdefault((key.rid, int(rows.ints["position"][row])), tie)
    return list(found.values())


def _usual_routing(evidence: Evidence) -> float:
    """How many of these ties rounding makes."""
    return float(_said(evidence).get("usual", 0.0))


def _said(evidence: Evidence) -> dict[str, Any]:
    events = () if evidence.reference is None else evidence.reference.named("routing")
    return next((event.data for event in events), {})
