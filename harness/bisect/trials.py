"""One version judged: earlier runs first, then as many new ones as the call needs.

It must not know how a run is made: that is a function it is given, so that the policy can be tried without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.bisect.repeats import Rate
from harness.bisect.search import Tried
from harness.bisect.subjects import Failure, Run, call, learned, why
from harness.bisect.verdicts import Cache

#: What a run is kept under; None where it cannot be kept.
Identity = Mapping[str, Any] | None


@dataclass(slots=True, kw_only=True)
class Trials:
    """Judges versions of one search. repeat: runs of each version, None for one unless the failure comes and goes.

    failure and rate are learned at the bad end, which is judged first.
    """

    failure: Failure
    cache: Cache
    repeat: int | None = None
    fresh: bool = False
    rate: Rate | None = None
    measured: bool = field(default=False)
    #: every version that has a call, in the order they were judged
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
        first = not self.measured
        runs = list(kept) if first else kept[: self._enough(kept)]
        used = len(runs)
        while len(runs) < self.wanted and (first or not self._bad(runs)):
            runs.append(one_run())
            if identity is not None:
                self.cache.add(identity, runs[-1])
            if call(runs[-1], self.failure) == "unknown":
                break
        if first:
            self._learn(runs)
        self.judged.append(self._sum_up(name, runs, used))
        return self.judged[-1]

    def _enough(self, kept: list[Run]) -> int:
        """How many kept runs settle it: up to the first failure, else as many passes as are wanted."""
        calls = [call(run, self.failure) for run in kept]
        return calls.index("bad") + 1 if "bad" in calls else self.wanted

    def _bad(self, runs: list[Run]) -> bool:
        return any(call(run, self.failure) == "bad" for run in runs)

    def _learn(self, runs: list[Run]) -> None:
        self.measured = True
        self.failure = learned(self.failure, runs)
        calls = [call(run, self.failure) for run in runs]
        known = [one for one in calls if one != "unknown"]
        if known:
            self.rate = Rate(failures=known.count("bad"), tries=len(known))

    def _sum_up(self, name: str, runs: list[Run], used: int) -> Tried:
        calls = [call(run, self.failure) for run in runs]
        failures = calls.count("bad")
        verdict = "bad" if failures else "unknown" if "unknown" in calls or not runs else "good"
        telling = runs[calls.index(verdict)] if verdict in calls else None
        risk = self.rate.risk(len(runs)) if verdict == "good" and self.repeated and self.rate is not None else 0.0
        return Tried(
            name=name,
            call="bad" if failures else "good" if verdict == "good" else "unknown",
            why=why(telling, self.failure) if telling is not None else "no verdict",
            tries=len(runs),
            failures=failures,
            cached=used,
            risk=risk,
            seconds=sum(run.seconds for run in runs[used:]),
            run=(telling.run or None) if telling is not None else None,
            kinds=telling.kinds if telling is not None else (),
        )
