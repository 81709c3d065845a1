"""Accept lengths and tie rates of cells over the nights, and their charts: every place in them is computed here.

For information: they decide nothing, and whether a night is green is what the gate said and says. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.contract.words import counted
from harness.night.records import CellResult, Night

#: Nights that a value must have been seen in before a change of it is pointed out, and the change in deviations.
TREND_NIGHTS, TREND_DEVIATIONS = 5, 3.0
#: The newest nights that a chart shows, and the charts that a page shows; moved values come first.
MOST_NIGHTS, MOST_CHARTS = 60, 60
#: Standard normal quantile of a 95 % interval.
QUANTILE = 1.96
#: The drawing: its size, and the room around the plot for what is written beside it.
WIDTH, HEIGHT = 340.0, 136.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 14.0, 12.0, 28.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One value of one cell in one night: the value, its 95 % interval, and of how many."""

    value: float
    low: float
    high: float
    count: int


def accepted(cell: CellResult) -> Measured | None:
    """Mean accept length, with 1.96 standard errors of it as if verifies were independent; None without a verify."""
    count, mean = sum(cell.accepted.values()), cell.mean_accepted
    if mean is None:
        return None
    squares = math.fsum(times * (length - mean) ** 2 for length, times in cell.accepted.items())
    error = QUANTILE * math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0
    return Measured(value=mean, low=mean - error, high=mean + error, count=count)


def lost(cell: CellResult) -> Measured | None:
    """Percent of the expected accept length that was not observed, without an interval: pairs, not counts, vary."""
    value = cell.lost
    return None if value is None else Measured(value=value, low=value, high=value, count=cell.accept[0])


def tied(cell: CellResult) -> Measured | None:
    """Tie rate with Wilson's interval (1927), which stays inside 0 to 1 and costs no sum over choices."""
    rate, count = cell.tie_rate, cell.choices
    if rate is None:
        return None
    wide = QUANTILE**2 / count
    middle = (rate + wide / 2) / (1 + wide)
    half = QUANTILE / (1 + wide) * math.sqrt(rate * (1 - rate) / count + wide / (4 * count))
    return Measured(
        value=rate, low=min(max(middle - half, 0.0), rate), high=max(min(middle + half, 1.0), rate), count=count
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What is tracked: of what a night counts it, and how it is written."""

    of: str
    unit: str
    digits: int
    measure: Callable[[CellResult], Measured | None]


VALUES = {
    "accept length": Value(of="verifies", unit="tokens", digits=2, measure=accepted),
    "accept length lost": Value(of="verifies", unit="percent", digits=1, measure=lost),
    "tie rate": Value(of="choices", unit="", digits=4, measure=tied),
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
    for what, value in VALUES.items():
        tonight = value.measure(cell)
        if tonight is None:
            continue
        before = [value.measure(one) for night in green if (one := night.cell(cell.key)) is not None]
        earlier = spread([one.value for one in before if one is not None])
        moved = _moved(tonight.value, earlier)
        found.append(Trend(cell=cell.key, what=what, tonight=tonight.value, before=earlier, moved=moved))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One night in a chart. mark: green, red or moved; x, y, top, bottom: places in the drawing."""

    night: str
    day: str
    mark: str
    measured: Measured
    x: float
    y: float
    top: float
    bottom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One value of one cell. band: mean and spread of green nights before the last; places: its (top, middle, bottom).

    ticks: (place, text) beside the plot.
    """

    cell: str
    what: str
    of: str
    digits: int
    unit: str
    points: tuple[Point, ...]
    band: Spread | None
    places: tuple[float, float, float] | None
    ticks: tuple[tuple[float, str], ...]
    moved: bool

    @property
    def line(self) -> str:
        """The points joined, as SVG wants them."""
        return " ".join(f"{one.x:.1f},{one.y:.1f}" for one in self.points)

    @property
    def sentence(self) -> str:
        """The chart in words, for who cannot see it."""
        last = self.points[-1].measured.value
        said = f"{self.what} of {self.cell}: {last:.{self.digits}f} in the last of {counted(len(self.points), 'night')}"
        if self.band is None:
            return f"{said}; no green night before it"
        mean, deviation = self.band.mean, self.band.deviation
        before = counted(self.band.nights, "green night")
        moved = ", outside what they showed" if self.moved else ""
        return f"{said}; {before} before it: {mean:.{self.digits}f} ± {deviation:.{self.digits}f}{moved}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trends:
    """All charts of a store. nights: those shown, of this device; left: charts beyond MOST_CHARTS."""

    device: str
    nights: tuple[Night, ...]
    charts: tuple[Chart, ...]
    left: int

    @property
    def drawing(self) -> dict[str, float]:
        """The size of a chart and where its plot begins and ends."""
        return {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "foot": HEIGHT - 6}


def trends_of(nights: Sequence[Night]) -> Trends | None:
    """Charts of the last night's cells over the nights of its kind, oldest first; None without a night."""
    if not nights:
        return None
    last = nights[-1]
    alike = [one for one in nights if not last.plan.differs(one.plan)]
    green = [one for one in alike[:-1] if one.green]
    shown = alike[-MOST_NIGHTS:]
    charts = [_chart(trend, shown) for cell in last.cells for trend in trends(cell, green)]
    charts.sort(key=lambda chart: not chart.moved)
    return Trends(
        device=last.plan.device,
        nights=tuple(shown),
        charts=tuple(charts[:MOST_CHARTS]),
        left=max(len(charts) - MOST_CHARTS, 0),
    )


def _chart(trend: Trend, nights: Sequence[Night]) -> Chart:
    value = VALUES[trend.what]
    seen = [(one, value.measure(cell)) for one in nights if (cell := one.cell(trend.cell)) is not None]
    known = [(one, measured) for one, measured in seen if measured is not None]
    band = trend.before
    edges = [edge for _, one in known for edge in (one.low, one.high)]
    edges += [] if band is None else [band.mean - band.deviation, band.mean + band.deviation]
    place = _scale(min(edges), max(edges))
    step = (WIDTH - LEFT - RIGHT) / max(len(known) - 1, 1)
    points = [
        Point(
            night=one.plan.id,
            day=one.plan.created[:10],
            mark="moved" if trend.moved and one is known[-1][0] else "green" if one.green else "red",
            measured=measured,
            x=LEFT + at * step if len(known) > 1 else (LEFT + WIDTH - RIGHT) / 2,
            y=place(measured.value),
            top=place(measured.high),
            bottom=place(measured.low),
        )
        for at, (one, measured) in enumerate(known)
    ]
    return Chart(
        cell=trend.cell,
        what=trend.what,
        of=value.of,
        digits=value.digits,
        unit=value.unit,
        points=tuple(points),
        band=band,
        places=None
        if band is None
        else (place(band.mean + band.deviation), place(band.mean), place(band.mean - band.deviation)),
        ticks=tuple((place(edge), f"{edge:.{value.digits}f}") for edge in dict.fromkeys((max(edges), min(edges)))),
        moved=trend.moved,
    )


def _scale(low: float, high: float) -> Callable[[float], float]:
    """From a value to its place; what never varies lies in the middle."""
    span = high - low
    height = HEIGHT - TOP - BOTTOM

    def place(value: float) -> float:
        return TOP + height * ((high - value) / span if span > 0 else 0.5)

    return place
