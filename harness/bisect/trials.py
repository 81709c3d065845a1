"""What the runs of one version add up to: earlier runs first, then as many new ones as the call needs.

A failure seen is a fact, so `bad` is certain; `good` after n passes is wrong with probability (1 - p)^n where a bad
version shows the failure in p of its runs. p is measured where the failure is known to be, and its lower confidence
bound is used. It assumes that runs are independent (each boots its own engine) and that p is the same wherever the
failure is. How a run is made is a function that is passed in, so that the policy can be tried without an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.bisect.search import Call, Tried
from harness.bisect.verdicts import Cache, Failure, Run
from harness.contract.rates import interval
from harness.contract.scenario import Scenario
from harness.contract.types import Outcome

#: Of the interval for p: it lies above its lower bound with this probability.
CONFIDENCE = 0.95
#: A `good` may be wrong with this probability at most, where the number of tries is ours to choose.
RISK = 0.01
#: More tries than this are not made for one version: a failure this rare needs another scenario.
MOST_TRIES = 60

#: What a run is kept under; None where it cannot be kept.
Identity = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is searched for: a scenario, what it was named by, and its failure."""

    name: str
    scenario: Scenario
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How often the failure showed where it is known to be."""

    failures: int
    tries: int

    @property
    def lower(self) -> float:
        """Clopper-Pearson: the p at which so many failures or more would still be seen with 1 - CONFIDENCE."""
        return interval(self.failures, self.tries, alpha=2 * (1 - CONFIDENCE))[0]

    @property
    def flaky(self) -> bool:
        return 0 < self.failures < self.tries

    def risk(self, passes: int) -> float:
        """Probability at most that a bad version passes so often in a row."""
        return float((1 - self.lower) ** passes)

    def tries_for(self, risk: float = RISK) -> int:
        """Passes in a row after which a `good` is wrong with `risk` at most; MOST_TRIES at most."""
        if not 0 < self.lower < 1:
            return 1 if self.lower >= 1 else MOST_TRIES
        return max(1, min(MOST_TRIES, math.ceil(math.log(risk) / math.log(1 - self.lower))))


@dataclass(slots=True, kw_only=True)
class Trials:
    """Judges versions of one search. repeat: runs of each version, None for one unless the failure comes and goes.

    failure and rate are learned at the bad end, which is judged first. judged: every version that has a call, in order.
    """

    failure: Failure
    cache: Cache
    repeat: int | None = None
    fresh: bool = False
    rate: Rate | None = None
    judged: list[Tried] = field(default_factory=list)

    @property
    def repeated(self) -> bool:
        """Whether a single pass is not taken for an answer."""
        return (self.repeat or 1) > 1 or (self.rate is not None and self.rate.flaky)

    @property
    def wanted(self) -> int:
        """Passes in a row that make a version good."""
        if self.repeat is not None:
            return self.repeat
        return self.rate.tries_for() if self.rate is not None and self.rate.flaky else 1

    def judge(self, name: str, *, identity: Identity, one_run: Callable[[], Run]) -> Tried:
        """The call on one version; the first one judged must be the bad end, which is run in full."""
        kept = [] if identity is None or self.fresh else self.cache.runs(identity)
        first = not self.judged
        runs = kept if first else kept[: self._enough(kept)]
        used = len(runs)
        while len(runs) < self.wanted and (first or "bad" not in self._calls(runs)):
            runs.append(one_run())
            if identity is not None and runs[-1].outcome is not Outcome.UNKNOWN:
                self.cache.add(identity, runs[-1])
            if runs[-1].call(self.failure) == "unknown":
                break
        if first:
            self._learn(runs)
        self.judged.append(self._sum_up(name, runs, used))
        return self.judged[-1]

    def _calls(self, runs: Sequence[Run]) -> list[Call]:
        return [run.call(self.failure) for run in runs]

    def _enough(self, kept: Sequence[Run]) -> int:
        """How many kept runs settle it: up to the first failure, else as many passes as are wanted."""
        calls = self._calls(kept)
        return calls.index("bad") + 1 if "bad" in calls else self.wanted

    def _learn(self, runs: Sequence[Run]) -> None:
        """The failure by the first signature seen, where nothing else says what it is, and how often it showed."""
        if not self.failure.signature and not self.failure.kinds:
            seen = (run.signatures[0] for run in runs if run.outcome is Outcome.FAIL and run.signatures)
            self.failure = Failure(signature=next(seen, ""))
        known = [one for one in self._calls(runs) if one != "unknown"]
        if known:
            self.rate = Rate(failures=known.count("bad"), tries=len(known))

    def _sum_up(self, name: str, runs: Sequence[Run], used: int) -> Tried:
        calls = self._calls(runs)
        call: Call = "bad" if "bad" in calls else "unknown" if "unknown" in calls or not runs else "good"
        decisive = runs[calls.index(call)] if runs else Run(outcome=Outcome.UNKNOWN)
        return Tried(
            name=name,
            call=call,
            why=decisive.reason(self.failure),
            tries=len(runs),
            failures=calls.count("bad"),
            cached=used,
            risk=self.rate.risk(len(runs)) if call == "good" and self.repeated and self.rate is not None else 0.0,
            seconds=sum(run.seconds for run in runs[used:]),
            run=decisive.run or None,
            kinds=decisive.kinds,
        )
