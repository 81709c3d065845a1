"""Drives many scenarios on one live engine and keeps what there is to say: verdicts, findings, situations, cost.

It must not stop at a failure and must not keep traces: thousands of scenarios go through one hunt.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import checkpoints
from cases.boots import Boot
from cases.generated_handoffs import generate
from cases.situations import ReachTable
from cases.strategies import Greedy, programs
from harness.checks.findings import Finding
from harness.contract.types import Outcome, Scenario
from harness.driving.live import LiveEngines
from harness.driving.progress import ScenarioResult
from harness.engines import envs
from harness.search.shrink import Budget, Shrunk, Step, shrink
from harness.search.tally import FindingTally, roots, tally


def greedy_text(boot: Boot) -> Greedy:
    """What the reference generates greedily, remembered; for stop ids that occur."""
    import torch

    from reference.pairs import load_pair
    from reference.session import ReferenceSession

    torch.set_num_threads(1)  # tiny matrices: more threads only get in each other's way
    made = checkpoints.make(boot.checkpoint, envs.home() / "checkpoints")
    session = ReferenceSession(*load_pair(made.target, made.draft), boot.spec)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def greedy(prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
        text = known.get(prompt, ())
        if len(text) < new:  # greedy text goes on as it began
            text = known[prompt] = (*text, *session.generate((*prompt, *text), new - len(text)))
        return text[:new]

    return greedy


def drawn(boot: Boot, *, count: int, seed_value: int) -> list[Scenario]:
    """`count` generated scenarios for one boot configuration: hand-overs for a pair of engines, else batch programs."""
    if boot.engine.pd:
        return generate(boot, count=count, seed=seed_value)
    return list(programs(boot, count=count, seed_value=seed_value, greedy=greedy_text(boot)))


@dataclass(slots=True, kw_only=True)
class Hunt:
    """Scenarios on one release. folder: where specimens of failing scenarios go, one a signature and scenario."""

    engines: LiveEngines
    release: str
    revert: int | None = None
    folder: Path
    outcomes: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    table: ReachTable = field(default_factory=ReachTable)
    positions: int = 0
    seconds: float = 0.0
    specimens: dict[str, Path] = field(default_factory=dict)
    _failing: list[tuple[Scenario, tuple[Finding, ...]]] = field(default_factory=list)

    def drive(self, scenario: Scenario) -> ScenarioResult:
        """Drive and judge one scenario and note everything about it."""
        start = time.monotonic()
        outcome = self.engines(scenario, engine=self.release, revert=self.revert, fresh=True)
        self.seconds += time.monotonic() - start
        return self._noted(outcome)

    def drive_all(self, scenarios: Iterable[Scenario]) -> Iterator[ScenarioResult]:
        """The same for many, each judged while the engine is at the next one."""
        start = time.monotonic()
        for outcome in self.engines.stream(scenarios, engine=self.release, revert=self.revert):
            self.seconds += time.monotonic() - start
            yield self._noted(outcome)
            start = time.monotonic()

    def _noted(self, outcome: ScenarioResult) -> ScenarioResult:
        scenario = outcome.scenario
        self.outcomes[str(outcome.verdict.outcome)] += 1
        self.positions += outcome.verdict.compared.get("positions", 0)
        self.table.add(scenario, outcome.verdict)
        if outcome.findings:
            self._failing.append((scenario, outcome.findings))
        if outcome.verdict.outcome is Outcome.UNKNOWN:
            self.unknown.update(outcome.verdict.reasons)
        if not outcome.passed:
            self.specimens[scenario.id] = outcome.save_specimen(self.folder)
        return outcome

    def findings(self) -> list[FindingTally]:
        """One line a signature, roots first."""
        return tally(self._failing)

    def fails(self, scenario: Scenario) -> frozenset[str]:
        """Root signatures of a scenario on this engine, for the shrinker; counted nowhere."""
        return roots(self.engines(scenario, engine=self.release, revert=self.revert, fresh=True).findings)

    def shrink(self, found: FindingTally, *, budget: Budget, progress: Callable[[Step], None]) -> tuple[Shrunk, Path]:
        """The smallest scenario with this finding, and the folder of its specimen."""
        shrunk = shrink(found.smallest, self.fails, found.signature, budget=budget, progress=progress)
        outcome = self.engines(shrunk.scenario, engine=self.release, revert=self.revert, fresh=True)
        return shrunk, outcome.save_specimen(self.folder)


def as_json(hunt: Hunt) -> dict[str, Any]:
    """Everything a hunt knows, JSON-ready."""
    return {
        "release": hunt.release,
        "revert": hunt.revert,
        "scenarios": hunt.outcomes.total(),
        "verdicts": dict(hunt.outcomes),
        "positions": hunt.positions,
        "seconds": round(hunt.seconds, 1),
        "boots": hunt.engines.boots,
        "findings": [
            {
                "signature": found.signature,
                "scenarios": found.scenarios,
                "divergences": found.divergences,
                "root": not found.consequence,
                "smallest": str(hunt.specimens.get(found.smallest.id, "")),
            }
            for found in hunt.findings()
        ],
        "unknown": dict(hunt.unknown),
        "situations": [
            {
                "name": line.name,
                "generated": line.generated,
                "reached": line.reached,
                "seen": line.seen,
                "times": line.times,
                "positions": line.positions,
            }
            for line in hunt.table.lines.values()
        ],
    }
