"""Makes a failing scenario small: the same failure signature from fewer requests, ops, tokens and knobs.

A candidate counts only if it shows the *same* signature; another failure on the way is not followed, but it is told.
It must not run an engine: the caller says what a scenario's failures are, and what that may cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.contract.types import Scenario
from harness.search.smaller import simpler_boots, smaller
from harness.search.tally import size

#: The root signatures of a scenario's failures; empty if it passes or cannot be judged.
Fails = Callable[[Scenario], frozenset[str]]

#: Failures after which an engine must be booted anew.
ENDING = ("CRASH:", "HANG:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop: seconds of wall time, engine restarts, scenarios tried."""

    seconds: float = 60.0
    restarts: int = 4
    tries: int = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Progress: one candidate tried. kept: it still fails in the same way and is the best so far."""

    tries: int
    seconds: float
    kept: bool
    best: Scenario
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """The smallest scenario found. finished: nothing smaller was left to try; other: signatures met on the way."""

    scenario: Scenario
    signature: str
    tries: int
    seconds: float
    restarts: int
    finished: bool
    other: frozenset[str]


class _BudgetSpent(Exception):
    pass


@dataclass(slots=True)
class _Search:
    fails: Fails
    signature: str
    budget: Budget
    progress: Callable[[Step], None]
    best: Scenario
    start: float = field(default_factory=time.monotonic)
    seen: set[str] = field(default_factory=set)
    other: set[str] = field(default_factory=set)
    restarts: int = 0
    booted: str = ""

    def shows(self, candidate: Scenario, what: str) -> bool:
        """Whether a candidate fails in the same way; then it is the best so far."""
        if candidate.id in self.seen or size_with_knobs(candidate) >= size_with_knobs(self.best):
            return False
        if candidate.boot_key() != self.booted:
            self._restart(candidate)
        if self._seconds() >= self.budget.seconds or len(self.seen) >= self.budget.tries:
            raise _BudgetSpent
        self.seen.add(candidate.id)
        found = self.fails(candidate)
        self.other |= found - {self.signature}
        if any(signature.startswith(ENDING) for signature in found):
            self.booted = ""
        kept = self.signature in found
        if kept:
            self.best = candidate
        self.progress(Step(tries=len(self.seen), seconds=self._seconds(), kept=kept, best=self.best, what=what))
        return kept

    def _restart(self, candidate: Scenario) -> None:
        if self.restarts >= self.budget.restarts:
            raise _BudgetSpent
        self.restarts += 1
        self.booted = candidate.boot_key()

    def _seconds(self) -> float:
        return time.monotonic() - self.start


def shrink(
    scenario: Scenario,
    fails: Fails,
    signature: str,
    *,
    budget: Budget | None = None,
    progress: Callable[[Step], None] = lambda _step: None,
) -> Shrunk:
    """The smallest scenario found with root signature `signature`; `scenario` itself if nothing smaller has it.

    First within its boot configuration, then with simpler boot configurations as far as the restarts last.
    """
    search = _Search(
        fails=fails,
        signature=signature,
        budget=budget or Budget(),
        progress=progress,
        best=scenario,
        booted=scenario.boot_key(),
    )
    finished = True
    try:
        _to_fixpoint(search, smaller)
        for candidate, what in simpler_boots(search.best):
            if search.shows(candidate, what):
                _to_fixpoint(search, smaller)
    except _BudgetSpent:
        finished = False
    return Shrunk(
        scenario=search.best,
        signature=signature,
        tries=len(search.seen),
        seconds=search._seconds(),
        restarts=search.restarts,
        finished=finished,
        other=frozenset(search.other),
    )


def _to_fixpoint(search: _Search, candidates: Callable[[Scenario], Iterator[tuple[Scenario, str]]]) -> None:
    """Start over after every success: the greatest cuts come first."""
    while any(search.shows(candidate, what) for candidate, what in candidates(search.best)):
        pass


def size_with_knobs(scenario: Scenario) -> tuple[int, ...]:
    """As `tally.size`, and last how far the boot configuration is from the simplest one."""
    plain = Scenario.model_fields["engine"].default
    unusual = sum(
        getattr(scenario.engine, name) != getattr(plain, name) for name in ("page", "prefix_cache", "pool_tokens")
    )
    return (*size(scenario), unusual, scenario.spec.k, scenario.spec.t)
