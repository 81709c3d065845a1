"""Charts of a store of nights: every place in them against numbers computed here in another way."""

from __future__ import annotations

import math
import statistics

import pytest

from cases.meta import nights
from harness.night import trends
from harness.night.trends import BOTTOM, HEIGHT, LEFT, QUANTILE, RIGHT, TOP, TREND_NIGHTS, WIDTH, trends_of

STORE = nights.store_of_twelve()


def chart(cell, what, store=STORE):
    (found,) = [one for one in trends_of(store).charts if (one.cell, one.what) == (cell, what)]
    return found


def lengths(night):
    accepted = night.cell("0.5.13/fixed/eagle").accepted
    return [length for length, times in accepted.items() for _ in range(times)]


def test_the_band_is_that_of_green_nights_before_the_last():
    assert [one.green for one in STORE].count(False) == 1
    found = chart("0.5.13/fixed/eagle", "accept length")
    before = [statistics.mean(lengths(one)) for one in STORE[:-1] if one.green]
    assert len(before) >= TREND_NIGHTS
    assert (found.band.mean, found.band.deviation) == pytest.approx((statistics.mean(before), statistics.stdev(before)))
    top, middle, bottom = found.places
    assert middle - top == pytest.approx(bottom - middle)
    assert found.moved
    assert found.points[-1].mark == "moved"


def test_a_night_shows_its_mean_and_an_interval_around_it():
    found = chart("0.5.13/fixed/eagle", "accept length")
    for point, night in zip(found.points, STORE, strict=True):
        own = lengths(night)
        error = QUANTILE * statistics.stdev(own) / math.sqrt(len(own))
        assert (point.measured.value, point.measured.high - point.measured.value) == pytest.approx(
            (statistics.mean(own), error)
        )
        assert point.measured.count == len(own)


def test_the_interval_of_a_rate_is_the_rates_that_lie_so_many_deviations_away():
    """Wilson's: the two rates p with |seen - p| = 1.96 sqrt(p (1 - p) / n), cut to 0 and 1."""
    for ties, choices in ((1, 2000), (60, 2000), (0, 90), (90, 90)):
        found = trends.tied(nights.cell(ties=ties, choices=choices))
        for end in (found.low, found.high):
            if 1e-9 < end < 1 - 1e-9:
                allowed = QUANTILE * math.sqrt(end * (1 - end) / choices)
                assert abs(ties / choices - end) == pytest.approx(allowed)
        assert 0 <= found.low <= found.value <= found.high <= 1


def test_places_are_inside_the_plot_and_in_the_order_of_values_and_nights():
    charts = trends_of(STORE).charts
    assert len(charts) > 2
    for found in charts:
        points = sorted(found.points, key=lambda one: one.measured.value)
        assert [one.y for one in points] == sorted((one.y for one in points), reverse=True)
        assert [one.x for one in found.points] == sorted(one.x for one in found.points)
        assert all(LEFT <= one.x <= WIDTH - RIGHT for one in found.points)
        edges = [edge for one in found.points for edge in (one.top, one.y, one.bottom)] + list(found.places or ())
        assert all(TOP - 1e-6 <= edge <= HEIGHT - BOTTOM + 1e-6 for edge in edges)
        assert all(one.top <= one.y <= one.bottom for one in found.points)


def test_a_red_night_is_marked_and_what_moved_comes_first():
    found = trends_of(STORE)
    order = [one.moved for one in found.charts]
    assert order == sorted(order, reverse=True)
    assert order.count(True) == 2
    marks = {one.day: one.mark for one in chart("0.5.23/case/pr25015", "accept length").points}
    assert marks["2026-11-21"] == "red"
    assert marks["2026-11-20"] == "green"


def test_a_value_without_a_night_before_it_has_a_point_and_no_band():
    found = chart("0.5.23/fixed/tree", "tie rate")
    assert (len(found.points), found.band, found.places) == (1, None, None)
    assert found.sentence.endswith("in the last of 1 night; no green night before it")


def test_a_value_that_never_varies_is_a_level_line():
    found = chart("0.5.23/case/pr25015", "accept length")
    assert len({one.y for one in found.points}) == 1
    assert len(found.ticks) == 1


def test_nights_of_another_device_or_revert_are_not_among_them():
    other = nights.over(nights.night(nights.cell(), day=10, device="cuda"))
    reverted = nights.over(nights.night(nights.cell(), day=11, revert=25015))
    assert trends_of([other, reverted, *STORE]).charts == trends_of(STORE).charts
    assert [one.plan.device for one in trends_of([*STORE, other]).nights] == ["cuda"]
    assert trends_of([]) is None


def test_a_page_shows_so_many_nights_and_charts_and_says_what_it_left(monkeypatch):
    monkeypatch.setattr(trends, "MOST_NIGHTS", 3)
    monkeypatch.setattr(trends, "MOST_CHARTS", 2)
    found = trends_of(STORE)
    assert [one.plan.id for one in found.nights] == [one.plan.id for one in STORE[-3:]]
    assert (len(found.charts), found.left) == (2, 6)
    assert chart("0.5.13/fixed/eagle", "accept length").band.nights == 10, "compared with all of them all the same"
