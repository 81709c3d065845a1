"""What a run tells whoever watches it; every writer (console, store) is an observer and cannot affect the run.

Records only. It must not print.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checks.findings import Finding
from harness.contract.known_issues import Known, known_as
from harness.contract.types import Divergence, Outcome, Scenario, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """One judged scenario. seconds: wall time by part (engine, reference, judge, store).

    known: signature, or reason for UNKNOWN -> the known issues that it may be; says nothing about the verdict.
    """

    scenario: Scenario
    verdict: Verdict
    divergences: tuple[Divergence, ...]
    findings: tuple[Finding, ...]
    folder: Path
    specimen: Path | None
    text_identical: bool | None
    rounds: int
    draft_steps: int
    seconds: dict[str, float]
    known: Mapping[str, tuple[Known, ...]] = field(default_factory=dict)


def known_of(
    scenario: Scenario, verdict: Verdict, findings: Sequence[Finding], *, release: str, device: str
) -> dict[str, tuple[Known, ...]]:
    """What each finding of a scenario may be, and each reason where there is no verdict."""
    texts = [finding.signature for finding in findings]
    texts += verdict.reasons if verdict.outcome is Outcome.UNKNOWN else ()
    return known_as(texts, scenario=scenario, release=release, device=device, reasons=verdict.reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Where the wall time of a run went, in seconds, and how many engines were booted for it."""

    boots: int = 0
    boot_seconds: float = 0.0
    engine_seconds: float = 0.0
    reference_seconds: float = 0.0
    judge_seconds: float = 0.0
    store_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One finished run."""

    folder: Path
    engine: str
    device: str
    revert: int | None
    header: dict[str, Any]
    results: tuple[ScenarioResult, ...]
    verdict: Verdict
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """Something slow before the engine answers: waiting for a GPU, booting. log: where the engine's own output goes."""

    text: str
    log: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Booted:
    """An engine answered; header is the first rank's handshake."""

    header: dict[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A scenario begins; index counts from 1."""

    scenario: Scenario
    index: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """One loop turn was taken."""

    tick: int
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A scenario was judged."""

    result: ScenarioResult


Progress = Preparing | Booted | Started | Turned | Judged
Observer = Callable[[Progress], None]
