"""How many tokens verifies committed, counted for each draft shape. It must not draw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from reports.columns import join

#: Columns that name a draft shape.
SHAPE = ["algorithm", "num_steps", "eagle_topk", "num_draft_tokens"]


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


def shape(algorithm: str, k: int, t: int, n: int) -> str:
    """A draft shape in words."""
    return f"{algorithm}, {k} steps" + (f", topk {t}, {n} nodes" if t > 1 else "")


def histograms(parts: Iterable[pd.DataFrame]) -> list[Histogram]:
    """One histogram for each draft shape among accept_lengths frames, in order of first appearance."""
    table = join("accept_lengths", parts)
    return [_histogram(key, part["accept_len"]) for key, part in table.groupby(SHAPE, sort=False)]


def _histogram(key: tuple[str, int, int, int], lengths: pd.Series) -> Histogram:
    counts = lengths.value_counts()
    counts = counts.reindex(range(1, max(key[1] + 1, int(counts.index.max())) + 1), fill_value=0)
    most = int(counts.max())
    return Histogram(
        title=shape(*key),
        bars=tuple(
            Bar(length=int(length), count=int(count), share=count / len(lengths), width=100 * count / most)
            for length, count in counts.items()
        ),
        verifies=len(lengths),
        mean=float(lengths.mean()),
        spread=float(lengths.std(ddof=0)),
    )
