"""How often something happens, and how sure that is: exact binomial intervals.

scipy would bring 100 MB for one function; tries here are few, so the binomial sums are exact and short.
"""

from __future__ import annotations

import math
from collections.abc import Callable

#: Two-sided error probability of every interval that is printed.
ALPHA = 0.05


def at_least(shown: int, tried: int, rate: float) -> float:
    """P(at least `shown` of `tried`) at this rate."""
    if rate in (0.0, 1.0):
        return float(rate == 1.0 or shown == 0)
    return math.fsum(math.exp(_log_of(k, tried, rate)) for k in range(shown, tried + 1))


def _log_of(k: int, tried: int, rate: float) -> float:
    """Logarithm of P(exactly k): the number of ways alone has no float from 1 030 tries on."""
    ways = math.lgamma(tried + 1) - math.lgamma(k + 1) - math.lgamma(tried - k + 1)
    return ways + k * math.log(rate) + (tried - k) * math.log1p(-rate)


def interval(shown: int, tried: int, *, alpha: float = ALPHA) -> tuple[float, float]:
    """Clopper and Pearson's exact interval (Biometrika 26, 1934) for a rate; it holds with at least 1 - alpha.

    Raises ValueError unless 0 <= shown <= tried and 0 < tried.
    """
    if not 0 <= shown <= tried or tried < 1:
        raise ValueError(f"{shown} of {tried} is no share")
    low = 0.0 if shown == 0 else _root(lambda rate: at_least(shown, tried, rate) - alpha / 2)
    high = 1.0 if shown == tried else _root(lambda rate: at_least(shown + 1, tried, rate) - (1 - alpha / 2))
    return low, high


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function on [0, 1] passes zero."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
