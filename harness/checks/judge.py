"""Composes all checks into one verdict, coverage included. FAIL > UNKNOWN > PASS.

This module must not compare rows. Importing it imports every family, which registers its checks.
"""

from __future__ import annotations

from dataclasses import replace

from harness.checks import (
    chain,
    extend,
    handoff,
    inputs,
    ledger,
    losslessness,
    positions,
    ranks,
    rounds,
    sampled,
    seeds,
    slots,
    states,
    tails,
    verify,
)
from harness.checks.coverage import check_handshake, compared_enough, not_exercised, situations_wanted
from harness.checks.evidence import Evidence, gather
from harness.checks.findings import group, kinds, settle
from harness.checks.registry import CHECKS, CheckResult, Tie, register, run_check
from harness.checks.rounds import ends_here
from harness.checks.verify import truncated
from harness.contract import known_issues
from harness.contract.align import unpaired
from harness.contract.batches import Part, Share
from harness.contract.tolerance import TIE_MULTIPLE, budget_for, too_many_ties
from harness.contract.trace import Event, Trace
from harness.contract.types import Divergence, Kind, Outcome, Phase, Policy, Scenario, Verdict

FAMILIES = (
    positions,
    inputs,
    rounds,
    slots,
    states,
    ledger,
    ranks,
    chain,
    verify,
    extend,
    handoff,
    losslessness,
    sampled,
    tails,
    seeds,
)


@register(
    name="align",
    kinds=(Kind.MISSING_ROW, Kind.EXTRA_ROW),
    reads=("engine", "reference"),
    protects="both sides ran the same forwards for the same requests: a row on one side only is a finding",
)
def check_alignment(evidence: Evidence) -> CheckResult:
    """MISSING_ROW and EXTRA_ROW between the sides."""
    assert evidence.aligned is not None
    assert evidence.reference is not None
    stopped = {
        str(event.data["rid"]): event for event in evidence.reference.events if event.name == "reference_stopped"
    }
    near = sampled.near_ties(evidence)
    pruned = {part.share for parts in evidence.parts.values() for part in parts if ends_here(evidence, part)}
    found = [
        divergence
        for divergence in unpaired(evidence.aligned, evidence.engine.rows, evidence.reference.rows)
        if not _unneeded(evidence, divergence, pruned)
        and not _unanswered(divergence, stopped)
        and not _by_a_coin(divergence, near)
    ]
    reasons = [
        f"no reference for {rid} from round {event.data.get('round')} on: {event.data.get('why')}"
        for rid, event in stopped.items()
    ]
    return CheckResult(divergences=found, unknown=reasons)


def _by_a_coin(divergence: Divergence, near: frozenset[Share]) -> bool:
    """A token more or less that a coin at the edge of a share decides: a tie of check `sampled`, not a lost row."""
    key = divergence.key
    return key.phase == Phase.ACCEPT and (key.dp_rank, key.rid, key.epoch, key.committed) in near


def _unanswered(divergence: Divergence, stopped: dict[str, Event]) -> bool:
    """An engine row of a request that the reference had to give up: not extra, but UNKNOWN, with the reason."""
    event = stopped.get(divergence.key.rid)
    return event is not None and divergence.kind is Kind.EXTRA_ROW and divergence.round >= int(event.data["round"])


def _unneeded(evidence: Evidence, divergence: Divergence, pruned: set[tuple[int, str, int, int]]) -> bool:
    """What older workers leave out for a request that has just ended: its draft extend, the rest of its walk."""
    key = divergence.key
    share = (key.dp_rank, key.rid, key.epoch, key.committed)
    if divergence.kind is not Kind.MISSING_ROW or share not in pruned:
        return False
    if key.phase == Phase.EXTEND:
        return not evidence.table.of(share, Phase.EXTEND)
    accepted = len(evidence.table.of(share, Phase.ACCEPT))
    return key.phase == Phase.ACCEPT and truncated(evidence, share) and 0 < accepted <= key.slot


def judge(scenario: Scenario, engine: Trace, reference: Trace | None) -> tuple[Verdict, list[Divergence]]:
    """Judge one scenario: the verdict, and every divergence in order of time with its cause."""
    try:
        evidence = gather(scenario, engine, reference)
    except Exception as error:  # reported, never dropped
        reason = f"the trace cannot be indexed: {type(error).__name__}: {error}"
        return Verdict(outcome=Outcome.UNKNOWN, reasons=(reason,)), []
    result = CheckResult(unknown=check_handshake(evidence))
    # Checks without a reference first: where two name the same row, theirs is the plainer reason.
    for check in sorted(CHECKS.values(), key=lambda check: check.needs_reference):
        result.add(run_check(check, evidence))
    result.divergences += _tie_rate(result, evidence)
    hits = frozenset(who for who, parts in evidence.parts.items() if _from_cache(parts[0]))
    divergences = settle(result.divergences, ticks=evidence.ticks, prefix_hits=hits)
    if any(found.hint == ledger.LOST for found in divergences):
        divergences = settle(_not_cut_off(divergences), ticks=evidence.ticks, prefix_hits=hits)
    return _verdict(evidence, result, divergences), divergences


def _not_cut_off(divergences: list[Divergence]) -> list[Divergence]:
    """What was seen before somebody ended the engine: neither that end nor what is missing since."""
    ends = {found.signature for found in divergences if found.hint == ledger.LOST}
    return [
        replace(found, first=False) for found in divergences if found.signature not in ends and found.cause not in ends
    ]


def _from_cache(part: Part) -> bool:
    """Whether a request started from KV that another had written; what is handed over is its own."""
    return part.start > 0 and part.record.mode != "PREBUILT"


def _tie_rate(result: CheckResult, evidence: Evidence) -> list[Divergence]:
    """One TOKEN when ties are too many to be chance."""
    budget, topk = budget_for(evidence.dtype), evidence.scenario.spec.t
    if not result.ties or not too_many_ties(ties=len(result.ties), choices=result.choices, budget=budget, topk=topk):
        return []
    first: Tie = result.ties[0]
    return [
        Divergence(
            kind=Kind.TOKEN,
            check="ties",
            key=first.key,
            round=first.round,
            expected=f"about {budget.tie_rate(topk):.1%} ties within {TIE_MULTIPLE:g} numerical floors",
            observed=f"{len(result.ties)} of {result.choices}",
            policy=Policy.TIE,
            margin=first.margin,
            hint="tie-rate",
        )
    ]


def _covered(evidence: Evidence) -> tuple[dict[str, int], dict[str, int], list[str]]:
    try:
        return situations_wanted(evidence)
    except Exception as error:  # reported, never dropped
        return {}, {}, [f"coverage crashed: {type(error).__name__}: {error}"]


def _assumed(evidence: Evidence) -> list[str]:
    scenario, reference = evidence.scenario, evidence.reference
    if reference is None:
        return []
    return known_issues.notes(
        reference.header,
        scenario.spec,
        scenario.engine,
        release=str(evidence.engine.header.get("release") or known_issues.NEWEST),
        device=str(evidence.engine.header.get("device") or "cpu"),
    )


def _verdict(evidence: Evidence, result: CheckResult, divergences: list[Divergence]) -> Verdict:
    exempt, notes = not_exercised(evidence)
    assumed = _assumed(evidence)
    compared = {name: amount for name, amount in result.compared.items() if name not in exempt}
    coverage, inside, unmet = _covered(evidence)
    lost = [why for event in evidence.engine.events if (why := ledger.lost_by(event))]
    unknown = lost or [*result.unknown, *unmet, *compared_enough(evidence, compared, exempt)]
    findings = group(divergences)
    failed = [f"{finding.count} × {finding.signature}" for finding in findings if finding.is_root]
    outcome = Outcome.FAIL if failed else Outcome.UNKNOWN if unknown else Outcome.PASS
    return Verdict(
        outcome=outcome,
        reasons=(*failed, *unknown, *notes, *assumed, *result.notes),
        coverage=coverage,
        inside=inside,
        compared=compared,
        ties=len(result.ties),
        kinds=kinds(findings),
        root_kinds=kinds(findings, roots_only=True),
    )
