"""How near a draw came to another outcome: in probability, and in what logits would have to be off.

A draw turns on the end F of an interval: a sum of softmax probabilities p over some tokens. With an independent error
of standard deviation s in every logit, dF / dl_i = p_i ([i is one of them] - F) gives F the standard deviation

    s * sqrt(sum p_i^2 ([i is one of them] - F)^2)

so that the ends of a flat distribution over many tokens hardly move, and those between two likely ones move most. Other
functions of probabilities have a weight w_i a token where F has 0 or 1: p_i (w_i - sum w_j p_j). This module must not
know how large errors are.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """margin: how far the nearest end was from deciding otherwise, as probability (of greedy rules, in logits).

    distance, spread: of the end that errors reach first, how far it was, and its standard deviation where that of the
    logits is 1; infinite and 0 where no end moves.
    """

    margin: float = math.inf
    distance: float = math.inf
    spread: float = 0.0

    @property
    def reach(self) -> float:
        """The margin of two logits that errors turn around as easily: sqrt(2) is what two errors have."""
        return math.sqrt(2) * self.distance / self.spread if self.spread > 0 else math.inf

    def at(self, temperature: float) -> Near:
        """Of logits that were divided by a temperature."""
        return Near(margin=self.margin, distance=self.distance, spread=self.spread / temperature)


#: Where nothing was drawn.
NOWHERE = Near()


def nearest(*choices: Near) -> Near:
    """Of choices any of which would change the outcome."""
    first = min(choices, key=lambda one: one.reach)
    return Near(margin=min(one.margin for one in choices), distance=first.distance, spread=first.spread)


def farthest(*choices: Near) -> Near:
    """Of choices that would have to change together."""
    last = max(choices, key=lambda one: one.reach)
    return Near(margin=max(one.margin for one in choices), distance=last.distance, spread=last.spread)


def spread(probabilities: np.ndarray, weights: np.ndarray) -> float:
    """Standard deviation of sum(weights * probabilities), both [V], where that of every logit is 1."""
    return float(np.linalg.norm(probabilities * (weights - weights @ probabilities)))


def of_end(distance: float, deviation: float) -> Near:
    """An end this far away, of such a deviation."""
    return Near(margin=float(distance), distance=float(distance), spread=float(deviation))


def of_logits(distance: float) -> Near:
    """Two tokens that change places where their logits move against one another by `distance`.

    An end moves by a quarter of it at most: p (1 - p) is its slope.
    """
    return Near(margin=distance / 4, distance=distance, spread=math.sqrt(2)) if math.isfinite(distance) else NOWHERE
