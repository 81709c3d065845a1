"""Failures that come and go: how often to try before calling a version good, and how wrong that may be.

A failure seen is a fact, so `bad` is certain; `good` after n passes is wrong with probability (1 - p)^n where a bad
version shows the failure in p of its runs. p is measured where the failure is known to be, and its lower confidence
bound is used. It assumes that runs are independent (each boots its own engine) and that p is the same wherever the
failure is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Of the interval for p: it lies above its lower bound with this probability.
CONFIDENCE = 0.95
#: A `good` may be wrong with this probability at most, where the number of tries is ours to choose.
RISK = 0.01
#: More tries than this are not made for one version: a failure this rare needs another scenario.
MOST_TRIES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How often the failure showed where it is known to be."""

    failures: int
    tries: int

    @property
    def observed(self) -> float:
        return self.failures / self.tries

    @property
    def lower(self) -> float:
        """Clopper-Pearson: the p at which so many failures or more would still be seen with 1 - CONFIDENCE."""
        if self.failures == 0:
            return 0.0
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if _at_least(self.failures, self.tries, middle) > 1 - CONFIDENCE:
                high = middle
            else:
                low = middle
        return low

    @property
    def flaky(self) -> bool:
        return 0 < self.failures < self.tries

    def risk(self, passes: int) -> float:
        """Probability at most that a bad version passes so often in a row."""
        return float((1 - self.lower) ** passes)

    def tries_for(self, risk: float = RISK) -> int:
        """Passes in a row after which a `good` is wrong with `risk` at most; MOST_TRIES at most."""
        if self.lower <= 0:
            return MOST_TRIES
        if self.lower >= 1:
            return 1
        return max(1, min(MOST_TRIES, math.ceil(math.log(risk) / math.log(1 - self.lower))))


def _at_least(failures: int, tries: int, rate: float) -> float:
    """Binomial: probability of so many failures or more."""
    return sum(
        math.comb(tries, count) * rate**count * (1 - rate) ** (tries - count) for count in range(failures, tries + 1)
    )
