"""Accept lengths and tie rates of a cell over the nights: for information, they decide nothing. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.night.records import CellResult, Night

#: Nights that a value must have been seen in before a change of it is pointed out, and the change in deviations.
TREND_NIGHTS, TREND_DEVIATIONS = 5, 3.0

#: What is tracked -> its value in a cell, None where it has none.
TRACKED: dict[str, Callable[[CellResult], float | None]] = {
    "accept length": lambda cell: cell.mean_accepted,
    "accept length lost": lambda cell: cell.lost,
    "tie rate": lambda cell: cell.tie_rate,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation of a value over nights; deviation 0 for a single one."""

    mean: float
    deviation: float
    nights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One value of one cell over green nights. moved: tonight lies outside what they showed."""

    cell: str
    what: str
    tonight: float
    before: Spread | None
    moved: bool


def trends(cell: CellResult, green: Sequence[Night]) -> list[Trend]:
    """What is tracked of a cell, beside those of earlier green nights; none for a value that it has not."""
    found = []
    for what, measure in TRACKED.items():
        value = measure(cell)
        if value is None:
            continue
        values = [measure(before) for one in green if (before := one.cell(cell.key)) is not None]
        earlier = spread([one for one in values if one is not None])
        found.append(Trend(cell=cell.key, what=what, tonight=value, before=earlier, moved=_moved(value, earlier)))
    return found


def spread(values: Sequence[float]) -> Spread | None:
    """None without values."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(mean=statistics.fmean(values), deviation=deviation, nights=len(values))


def _moved(value: float, before: Spread | None) -> bool:
    """Fixed cells repeat exactly, so that any change counts; the margin is for the last bits of a mean."""
    if before is None or before.nights < TREND_NIGHTS:
        return False
    return abs(value - before.mean) > TREND_DEVIATIONS * before.deviation + 1e-9
