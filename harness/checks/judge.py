"""Composes all checks into one verdict, coverage included. FAIL > UNKNOWN > PASS.

This module must not compare rows. Importing it imports every module of checks, which registers them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from harness.checks import (
    accepts,  # noqa: F401
    answered,  # noqa: F401
    cached_rows,  # noqa: F401
    copied_states,  # noqa: F401
    inputs,  # noqa: F401
    logprobs,  # noqa: F401
    outputs,  # noqa: F401
    positions,  # noqa: F401
    ranks,  # noqa: F401
    reads,
    recurrent,  # noqa: F401
    reference_rows,  # noqa: F401
    returned_states,  # noqa: F401
    rows,  # noqa: F401
    served,  # noqa: F401
    slots,  # noqa: F401
    tensor_ranks,
    texts,  # noqa: F401
)
from harness.checks.asked import not_given, not_judged, not_published, witnessed
from harness.checks.coverage import check_handshake, compared_enough, coverage_wanted, not_exercised, undrafted
from harness.checks.ends import LOST, lost_by
from harness.checks.evidence import Evidence, gather
from harness.checks.explained import explained
from harness.checks.findings import group, kinds, settle
from harness.checks.registry import CHECKS, CheckResult, run_check
from harness.checks.set_aside import answered_with_errors, misfits, set_aside
from harness.checks.ties import routing_ties, tie_rate
from harness.contract import known_issues
from harness.contract.batches import Part
from harness.contract.finding_pages import NEWEST
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Divergence, Outcome, Verdict

#: Share of hidden rows that may say nothing before a PASS would promise too much.
MOST_INDISTINCT = 0.25


def judge(scenario: Scenario, engine: Trace, reference: Trace | None) -> tuple[Verdict, list[Divergence]]:
    """Judge one scenario: the verdict, and every divergence in order of time with its cause."""
    try:
        evidence = gather(scenario.sampled, engine, reference)
    except Exception as error:  # reported, never dropped
        reason = f"the trace cannot be indexed: {type(error).__name__}: {error}"
        return Verdict(outcome=Outcome.UNKNOWN, reasons=(reason,)), []
    unknown = [*check_handshake(evidence, asked=scenario.id), *not_given(engine.header), *not_judged(evidence)]
    result = CheckResult(unknown=unknown, notes=[*not_published(engine.header)])
    # Where two name the same row, the plainer reason stays: that TP ranks disagree, then what needs no reference, then
    # what it writes.
    order = {
        check.id: (check.needs_reference, check.id != tensor_ranks.ID, check.id == reads.ID)
        for check in CHECKS.values()
    }
    for check in sorted(CHECKS.values(), key=lambda check: order[check.id]):
        result.add(run_check(check, evidence))
    set_aside(evidence).leave_out(result)
    result.ties += routing_ties(evidence)
    result.divergences += tie_rate(evidence, result)
    result.unknown += _indistinct(result)
    hits = frozenset(who for who, parts in evidence.parts.items() if _from_cache(parts[0]))
    settled = partial(
        settle, scheduler_steps=evidence.scheduler_steps, prefix_hits=hits, explained=explained(reference).values()
    )
    divergences = settled(result.divergences)
    if any(found.hint == LOST for found in divergences):
        divergences = settled(_not_cut_off(divergences))
    return _verdict(evidence, result, divergences), divergences


def _not_cut_off(divergences: list[Divergence]) -> list[Divergence]:
    """What was seen before somebody ended the engine: neither that end nor what is missing since."""
    ends = {found.signature for found in divergences if found.hint == LOST}
    return [
        replace(found, first=False) for found in divergences if found.signature not in ends and found.cause not in ends
    ]


def _from_cache(part: Part) -> bool:
    """Whether a request started from KV that another had written; what is handed over is its own."""
    return part.start > 0 and part.record.mode != "PREBUILT"


def _indistinct(result: CheckResult) -> list[str]:
    """A reason for UNKNOWN where rounding makes so many rows indistinct that agreement says little."""
    total = result.compared.get("hidden_rows", 0) + result.indistinct
    if result.indistinct <= MOST_INDISTINCT * total:
        return []
    return [
        f"{result.indistinct} of {total} hidden rows agree within so much rounding that another row would: "
        "in this dtype these models cannot be compared by their states"
    ]


def _covered(evidence: Evidence) -> tuple[dict[str, int], dict[str, int], list[str]]:
    try:
        return coverage_wanted(evidence)
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
        release=str(evidence.engine.header.get("release") or NEWEST),
        device=str(evidence.engine.header.get("device") or "cpu"),
        asked={key for request in scenario.requests for key in request.asked},
    )


def _verdict(evidence: Evidence, result: CheckResult, divergences: list[Divergence]) -> Verdict:
    exempt, notes = not_exercised(evidence)
    unseen, limits = witnessed(evidence)
    undue, unasked = undrafted(evidence)
    assumed = _assumed(evidence)
    compared = {name: amount for name, amount in result.compared.items() if name not in exempt}
    coverage, inside, unmet = _covered(evidence)
    lost = [why for event in evidence.engine.events if (why := lost_by(event))]
    unknown = lost or [
        *answered_with_errors(evidence),
        *misfits(evidence),
        *result.unknown,
        *compared_enough(evidence, compared, exempt),
        *unmet,
        *unseen,
    ]
    unknown = unknown or undue
    findings = group(divergences)
    failed = [f"{finding.count} × {finding.signature}" for finding in findings if finding.is_root]
    outcome = Outcome.FAIL if failed else Outcome.UNKNOWN if unknown else Outcome.PASS
    return Verdict(
        outcome=outcome,
        reasons=(*failed, *unknown, *notes, *unasked, *limits, *assumed, *result.notes),
        coverage=coverage,
        inside=inside,
        compared=compared,
        ties=len(result.ties),
        kinds=kinds(findings),
        root_kinds=kinds(findings, roots_only=True),
    )
