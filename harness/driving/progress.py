"""What a run tells its observers as it goes: console and store are two, and none can affect the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.contract.scenario import Scenario
from harness.driving.results import ScenarioResult


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
class Stepped:
    """One scheduler step was taken."""

    scheduler_step: int
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A scenario was judged."""

    result: ScenarioResult


Progress = Preparing | Booted | Started | Stepped | Judged
Observer = Callable[[Progress], None]
