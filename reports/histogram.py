"""How many tokens verifies committed, counted for each draft shape. It must not draw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from reports.columns import join


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """length tokens were committed count times; share of all verifies, width of the longest bar (0 to 100)."""

    length: int
    count: int
    share: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """One draft shape: a bar for every length from 1 to k+1, zeros included, and any length beyond."""

    title: str
    bars: tuple[Bar, ...]
    verifies: int
    mean: float
    spread: float


def histograms(parts: Iterable[pd.DataFrame]) -> list[Histogram]:
    """One histogram for each (algorithm, k, t, n) among accept_lengths frames, in order of first appearance."""
    table = join("accept_lengths", parts)
    return [_histogram(part) for _, part in table.groupby(["algorithm", "k", "t", "n"], sort=False)]


def _histogram(part: pd.DataFrame) -> Histogram:
    shape = part.iloc[0]
    counts = part["accept_len"].value_counts()
    longest = max(int(shape["k"]) + 1, int(counts.index.max()))
    most = int(counts.max())
    bars = []
    for length in range(1, longest + 1):
        count = int(counts.get(length, 0))
        bars.append(Bar(length=length, count=count, share=count / len(part), width=100 * count / most))
    tree = f", topk {shape['t']}, {shape['n']} nodes" if int(shape["t"]) > 1 else ""
    return Histogram(
        title=f"{shape['algorithm']}, {shape['k']} steps{tree}",
        bars=tuple(bars),
        verifies=len(part),
        mean=float(part["accept_len"].mean()),
        spread=float(part["accept_len"].std(ddof=0)),
    )
