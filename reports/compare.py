"""What changed between two runs: verdicts, findings by signature, coverage, accepted lengths. Nothing is judged anew.

Only scenarios that both runs judged can be compared; the others are named. This module must not print.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from harness.contract.types import Outcome, Scenario
from harness.driving.progress import ScenarioResult
from reports.columns import join
from reports.reading import Report


class Change(StrEnum):
    """What became of a signature from the first run to the second."""

    NEW = "new"
    GONE = "gone"
    STILL = "still"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A root finding's signature over the scenarios that both runs judged: how often, and in which of them."""

    signature: str
    change: Change
    before: int
    after: int
    scenarios: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Accepted lengths of one draft shape: means, and what the difference of the means is uncertain by.

    error: standard error of the difference, NaN where either run has fewer than two verifies.
    """

    shape: str
    before: float
    after: float
    verifies: tuple[int, int]
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """before, after: the run's name, release and verdict. facts: what else differs between the engines.

    common: scenarios judged in both; edited: those of the same name whose program differs, not compared.
    """

    before: tuple[str, str, Outcome]
    after: tuple[str, str, Outcome]
    facts: tuple[tuple[str, str, str], ...]
    common: int
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    edited: tuple[str, ...]
    verdicts: tuple[tuple[str, Outcome, Outcome], ...]
    unjudged: tuple[str, ...]
    signatures: tuple[Signature, ...]
    coverage: tuple[tuple[str, int, int], ...]
    compared: tuple[tuple[str, int, int], ...]
    ties: tuple[int, int]
    lengths: tuple[Lengths, ...]
    missing: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether a verdict changed, or a signature came or went."""
        return bool(self.verdicts) or any(one.change is not Change.STILL for one in self.signatures)

    @property
    def open(self) -> list[str]:
        """Why it cannot be said that nothing changed; empty where it can."""
        reasons = list(self.missing)
        if not self.common:
            reasons.append("the two runs have no scenario in common")
        if self.unjudged:
            reasons.append(f"{', '.join(self.unjudged[:3])} could not be judged in either run")
        return reasons


#: What the handshake says of an engine, in words.
FACTS = {
    "release": "SGLang",
    "device": "device",
    "worker": "worker",
    "overlap": "overlap loop",
    "backend": "attention",
    "dtype": "dtype",
    "torch": "torch",
    "revert": "reverted",
}


def compare(before: Report, after: Report) -> Comparison:
    """The second run against the first."""
    ours, theirs = _by_program(before), _by_program(after)
    both = [name for name in ours if name in theirs]
    pairs = [(ours[name], theirs[name]) for name in both]
    counted = [pair for pair in pairs if all(one.verdict.compared for one in pair)]  # a specimen keeps no counts
    gone, came = _names(ours, set(both)), _names(theirs, set(both))
    edited = sorted(set(gone) & set(came))
    return Comparison(
        before=(before.source.name, before.source.release, before.result.verdict.outcome),
        after=(after.source.name, after.source.release, after.result.verdict.outcome),
        facts=_facts(before, after),
        common=len(both),
        only_before=tuple(name for name in gone if name not in edited),
        only_after=tuple(name for name in came if name not in edited),
        edited=tuple(edited),
        verdicts=tuple(
            (one.scenario.name, one.verdict.outcome, other.verdict.outcome)
            for one, other in pairs
            if one.verdict.outcome is not other.verdict.outcome
        ),
        unjudged=tuple(
            one.scenario.name for one, other in pairs if one.verdict.outcome is other.verdict.outcome is Outcome.UNKNOWN
        ),
        signatures=tuple(_signatures(pairs)),
        coverage=_counts((one.verdict.coverage, other.verdict.coverage) for one, other in counted),
        compared=_counts((one.verdict.compared, other.verdict.compared) for one, other in counted),
        ties=(sum(one.verdict.ties for one, _ in counted), sum(other.verdict.ties for _, other in counted)),
        lengths=tuple(_lengths(_accepted(before, both), _accepted(after, both))),
        missing=tuple(f"{one.source.name}: {one.source.missing}" for one in (before, after) if one.source.missing),
    )


def _by_program(report: Report) -> dict[str, ScenarioResult]:
    """Program -> result."""
    return {_program(one.scenario): one for one in report.result.results}


def _program(scenario: Scenario) -> str:
    """What was asked of the engine, whatever its knobs: one program, eagerly and in graphs, can be compared."""
    parts = scenario.model_dump(mode="json", include={"name", "spec", "requests", "script", "checkpoint"})
    return json.dumps(parts, sort_keys=True)


def _names(results: dict[str, ScenarioResult], both: set[str]) -> list[str]:
    return [one.scenario.name for name, one in results.items() if name not in both]


def _facts(before: Report, after: Report) -> tuple[tuple[str, str, str], ...]:
    values = ((words, *(str(one.source.engine.get(name)) for one in (before, after))) for name, words in FACTS.items())
    return tuple((words, ours, theirs) for words, ours, theirs in values if ours != theirs)


def _signatures(pairs: Sequence[tuple[ScenarioResult, ScenarioResult]]) -> Iterable[Signature]:
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    where: dict[str, dict[str, None]] = {}
    for pair in pairs:
        for side, one in zip(counts, pair, strict=True):
            for found in one.findings:
                if found.is_root:
                    side[found.signature] += found.count
                    where.setdefault(found.signature, {})[one.scenario.name] = None
    order = {Change.NEW: 0, Change.GONE: 1, Change.STILL: 2}
    found_ones = [
        Signature(
            signature=name,
            change=_change(counts[0][name], counts[1][name]),
            before=counts[0][name],
            after=counts[1][name],
            scenarios=tuple(places),
        )
        for name, places in where.items()
    ]
    return sorted(found_ones, key=lambda one: (order[one.change], one.signature))


def _change(before: int, after: int) -> Change:
    if before and after:
        return Change.STILL
    return Change.NEW if after else Change.GONE


def _counts(pairs: Iterable[tuple[dict[str, int], dict[str, int]]]) -> tuple[tuple[str, int, int], ...]:
    """Names whose sums differ."""
    before, after = Counter[str](), Counter[str]()
    for ours, theirs in pairs:
        before.update(ours)
        after.update(theirs)
    names = dict.fromkeys([*before, *after])
    return tuple((name, before[name], after[name]) for name in names if before[name] != after[name])


def _accepted(report: Report, both: Sequence[str]) -> pd.DataFrame:
    kept = [
        frames.accept_lengths
        for one, frames in zip(report.result.results, report.frames, strict=True)
        if _program(one.scenario) in both
    ]
    return join("accept_lengths", kept)


def _lengths(before: pd.DataFrame, after: pd.DataFrame) -> Iterable[Lengths]:
    shape = ["algorithm", "k", "t", "n"]
    ours, theirs = (
        {key: part["accept_len"] for key, part in table.groupby(shape, sort=False)} for table in (before, after)
    )
    for key in ours:
        if key in theirs:
            one, other = ours[key], theirs[key]
            algorithm, k, t, n = key
            tree = f", topk {t}, {n} nodes" if t > 1 else ""
            yield Lengths(
                shape=f"{algorithm}, {k} steps{tree}",
                before=float(one.mean()),
                after=float(other.mean()),
                verifies=(len(one), len(other)),
                error=math.sqrt(one.var() / len(one) + other.var() / len(other)),
            )
