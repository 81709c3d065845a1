"""The JSON that gates read: `run --json`, `recheck --json` and `matrix --json`. Stable; described in docs/json.md.

It must not compute anything new: every value comes from a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from harness.archive.trace_io import plain
from harness.checks.findings import Finding
from harness.contract.known_issues import Known, assumed_by
from harness.contract.types import Divergence
from harness.coverage import reach_of
from harness.driving.accept_lengths import AcceptLengths
from harness.driving.results import Interrupted, RunResult, ScenarioResult, accept_lengths_of, mean_accept_length
from reports.blame import server_flags, where
from reports.findings import around_of
from reports.terminal import covered

RUN_SCHEMA = 2
MATRIX_SCHEMA = 1


def divergence_document(found: Divergence) -> dict[str, Any]:
    """One divergence by its place and values."""
    return {
        "kind": str(found.kind),
        "check": found.check,
        "rid": found.key.rid,
        "dp_rank": found.key.dp_rank,
        "attempt": found.key.attempt,
        "committed_len": found.key.committed,
        "round": found.round,
        "phase": str(found.key.phase),
        "step": found.key.step,
        "slot": found.key.slot,
        "expected": plain(found.expected),
        "observed": plain(found.observed),
        "policy": str(found.policy),
        "margin": plain(found.margin),
        "hint": found.hint,
    }


def known_document(known: Sequence[Known]) -> list[dict[str, Any]]:
    """The known issues that something may be."""
    return [
        {"id": one.id, "title": one.title, "releases": one.window, "fixed_in": one.fixed_in, "link": one.link}
        | {"assume": one.assume, "shown_by": list(one.shown)}
        for one in known
    ]


def finding_document(finding: Finding, one: ScenarioResult) -> dict[str, Any]:
    """One finding: a signature, how often, whose consequence, where, what it may be and costs, its first divergence."""
    around = around_of(one, finding.signature)
    component, made, read = where(finding.first, one.scenario, one.setup.release, around)
    return {
        "signature": finding.signature,
        "kind": str(finding.first.kind),
        "scenario": one.scenario.name,
        "count": finding.count,
        "rids": list(finding.rids),
        "consequence_of": finding.consequence_of,
        "component": component,
        "made_by": made,
        "read_by": read,
        "around": around.facts,
        "known": known_document(one.known.get(finding.signature, ())),
        "accept": accept_document(one.accept_of.get(finding.signature)),
        "first": divergence_document(finding.first),
    }


def known_ids(one: ScenarioResult) -> list[str]:
    """The known issues that a scenario's findings and reasons may be."""
    return sorted({known.id for found in one.known.values() for known in found})


def accept_length(results: Sequence[ScenarioResult]) -> float | None:
    """The mean over all verifies, to four digits."""
    mean = mean_accept_length(results)
    return None if mean is None else round(mean, 4)


def accept_document(accept: AcceptLengths | None) -> dict[str, Any] | None:
    """Expected and observed accept lengths, and what is lost."""
    if accept is None:
        return None
    return {
        "verifies": accept.verifies,
        "expected": round(accept.mean_expected, 4),
        "observed": round(accept.mean_observed, 4),
        "lost_percent": round(accept.lost, 2) + 0.0,
        "sampled": accept.sampled,
    }


def providers_of(results: Sequence[ScenarioResult]) -> dict[str, str]:
    """Who judged target and draft; names with a comma between where scenarios had different ones."""
    sides = [one.providers for one in results if one.providers]
    return {side: ", ".join(dict.fromkeys(one[side] for one in sides)) for side in ("target", "draft") if sides}


def witness_document(results: Sequence[ScenarioResult]) -> dict[str, Any] | None:
    """How many rows a witness was asked of, and of how many there was none; null where no witness judged."""
    asked = [one.witnessed for one in results if one.witnessed.rows]
    if not asked:
        return None
    missing, rows = (sum(column) for column in zip(*(one.missing for one in asked), strict=True))
    return {"requests": sum(one.requests for one in asked), "rows": rows, "without": missing}


def scenario_document(result: ScenarioResult) -> dict[str, Any]:
    """One scenario of a run."""
    return {
        "name": result.scenario.name,
        "id": result.scenario.id,
        "verdict": str(result.verdict.outcome),
        "reasons": list(result.verdict.reasons),
        "kinds": list(result.verdict.root_kinds),
        "known": known_ids(result),
        "providers": dict(result.providers),
        "witness": witness_document([result]),
        "text_identical": result.text_identical,
        "rounds": result.rounds,
        "draft_steps": result.draft_steps,
        "accept_length": accept_length([result]),
        "accept": accept_document(result.accept),
        "coverage": dict(result.verdict.coverage),
        "compared": dict(result.verdict.compared),
        "ties": result.verdict.ties,
        "server_flags": server_flags(result.scenario, result.setup.release, result.setup.device),
        "output_ids": {end.rid: list(end.output_ids) for end in result.trace.ends},
        "folder": str(result.folder),
        "reproducer": None if result.reproducer is None else str(result.reproducer),
    }


def coverage_document(result: RunResult) -> dict[str, dict[str, int]]:
    """coverage point -> scenarios that asked for it, how many of them reached it, and how much was seen in all."""
    return {
        line.name: {
            "asked": line.generated,
            "reached": line.reached,
            "scenarios": line.seen,
            "times": line.times,
            "positions": line.positions,
        }
        for line in reach_of((one.scenario, one.verdict) for one in result.results)
    }


def run_document(result: RunResult) -> dict[str, Any]:
    """The whole run."""
    return {
        "schema": RUN_SCHEMA,
        "engine": result.engine,
        "device": result.device,
        "revert": result.revert,
        "worker": result.header.get("worker"),
        "overlap": result.header.get("overlap"),
        "covers": covered(result),
        "replaced": result.replaced,
        "assumed": assumed_by(result.verdict.reasons),
        "providers": providers_of(result.results),
        "witness": witness_document(result.results),
        **({} if result.pair is None else {"pair": dict(result.pair)}),
        "verdict": str(result.verdict.outcome),
        "reasons": list(result.verdict.reasons),
        "findings": [finding_document(finding, one) for one in result.results for finding in one.findings],
        "coverage": dict(result.verdict.coverage),
        "coverage_points": coverage_document(result),
        "compared": dict(result.verdict.compared),
        "ties": result.verdict.ties,
        "accept_length": accept_length(result.results),
        "accept": accept_document(accept_lengths_of(result.results)),
        "scenarios": [scenario_document(one) for one in result.results],
        "cost": dataclasses.asdict(result.cost),
        "run": str(result.folder),
    }


def interrupted_run(stop: KeyboardInterrupt) -> dict[str, Any]:
    """What was judged of a run that somebody ended."""
    assert isinstance(stop, Interrupted), "the run ends with nothing else"
    return run_document(stop.result)


def cell_document(
    result: RunResult, one: ScenarioResult, *, case: str, expected: str, as_expected: bool | None
) -> dict[str, Any]:
    """One cell of the matrix: one case on one engine, with or without a fix reverted."""
    first = next((found for found in one.divergences if found.first), None)
    return {
        "engine": result.engine,
        "device": result.device,
        "case": case,
        "revert": result.revert,
        "verdict": str(one.verdict.outcome),
        "reasons": list(one.verdict.reasons),
        "expected": expected,
        "as_expected": as_expected,
        "kinds": list(one.verdict.root_kinds),
        "first": None if first is None else first_document(first),
        "known": known_ids(one),
        "text_identical": one.text_identical,
        "run": str(result.folder),
    }


def first_document(found: Divergence) -> dict[str, Any]:
    """The first wrong place, in the words of the matrix."""
    whole = divergence_document(found)
    names = ("kind", "rid", "dp_rank", "committed_len", "round", "phase", "step", "slot", "expected", "observed")
    return {name: whole[name] for name in names}


def matrix_document(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": MATRIX_SCHEMA, "cells": cells}
