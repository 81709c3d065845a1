"""The gate's judgement: what is new, known, flaky and fixed, what makes a night red, and what it is compared with."""

from __future__ import annotations

import datetime
import math

import pytest

from cases.meta.nights import AHEAD, STOP, TODAY, cell, entry, night, over, seen
from harness.contract import rates
from harness.contract.types import Outcome
from harness.night.judge import GONE, Status, judge, scenarios_until_gone


def judged(one, *past, known=(), today=TODAY):
    return judge(one, past=past, known=known, today=today)


def statuses(found):
    return {(group.signature, group.engine): group.status for group in found.groups}


def test_a_finding_nobody_knows_is_new_and_red_with_its_signature():
    found = judged(night(cell("eagle", seen())))
    assert found.outcome is Outcome.FAIL
    assert statuses(found) == {(AHEAD, "0.5.13"): Status.NEW}
    assert found.reasons == (f"new: {AHEAD} on 0.5.13",)


def test_a_known_finding_is_green_only_on_its_release_in_its_cells_and_as_its_signature():
    known = [entry()]
    assert judged(night(cell("eagle", seen(STOP))), known=known).outcome is Outcome.PASS
    for other in (
        cell("eagle", seen(STOP), engine="0.5.23"),
        cell("plain", seen(STOP), kind="generated"),
        cell("eagle", seen(AHEAD), seen(STOP)),
    ):
        assert judged(night(cell("tree", seen(STOP)), other), known=known).outcome is Outcome.FAIL, other.key


def test_one_signature_on_two_releases_is_two_findings():
    one = night(cell("eagle", seen(STOP)), cell("eagle", seen(STOP), engine="0.5.23"))
    found = statuses(judged(one, known=[entry()]))
    assert found == {(STOP, "0.5.13"): Status.KNOWN, (STOP, "0.5.23"): Status.NEW}


def test_a_corpus_case_inside_its_window_is_known_by_its_kinds_and_nothing_else():
    bad = {"kind": "case", "expected": "FAIL", "expected_kinds": ("POSITION",)}
    assert judged(night(cell("pr25015", seen(), **bad))).outcome is Outcome.PASS
    found = judged(night(cell("pr25015", seen(), seen(STOP), **bad)))
    assert statuses(found) == {(AHEAD, "0.5.13"): Status.KNOWN, (STOP, "0.5.13"): Status.NEW}


def test_a_case_that_passes_where_it_must_fail_is_red():
    found = judged(night(cell("pr25015", kind="case", expected="FAIL", expected_kinds=("POSITION",))))
    assert found.outcome is Outcome.FAIL
    assert "passes, and its release window says FAIL" in found.wrong[0]


def test_a_cell_that_fails_without_a_finding_is_red():
    found = judged(night(cell(verdict=Outcome.FAIL, failed=1)))
    assert found.wrong == ("0.5.13/fixed/eagle fails and names no finding",)


def test_a_finding_that_does_not_show_again_is_flaky_and_red_with_an_exact_interval():
    found = judged(night(cell("eagle", seen(shown=1, tried=3))))
    (group,) = found.of(Status.FLAKY)
    assert found.outcome is Outcome.FAIL
    rate, low, high = group.rate
    assert rate == pytest.approx(1 / 3)
    # Ends by their definition: at them, so many or more (fewer) have a probability of 2.5 %.
    assert 1 - (1 - low) ** 3 == pytest.approx(0.025)
    assert (1 - high) ** 3 + 3 * high * (1 - high) ** 2 == pytest.approx(0.025)


def test_a_finding_of_a_fixed_cell_that_came_and_went_is_flaky_over_nights():
    past = [over(night(cell("eagle", *found), day=day)) for day, found in enumerate([(), (seen(),), (), ()], 20)]
    (group,) = judged(night(cell("eagle", seen())), *past).of(Status.FLAKY)
    assert (group.shown, group.tried) == (2, 4), "from the first night with it on, tonight included"
    assert group.since == past[1].plan.id


def test_a_finding_that_stays_is_new_every_night_until_it_is_known():
    past = [over(night(cell("eagle", *found), day=day)) for day, found in enumerate([(), (seen(),), (seen(),)], 20)]
    (group,) = judged(night(cell("eagle", seen())), *past).of(Status.NEW)
    assert group.since == past[1].plan.id


def test_generated_cells_draw_anew_so_that_absence_is_neither_fixed_nor_flaky():
    def made(day, *found):
        return night(cell("eagle/plain", *found, kind="generated"), day=day)

    past = [over(made(20, seen())), over(made(21)), over(made(22, seen()))]
    assert judged(made(28), *past).groups == ()
    assert statuses(judged(made(28, seen()), *past)) == {(AHEAD, "0.5.13"): Status.NEW}


def test_a_finding_that_is_gone_from_a_fixed_cell_is_fixed_and_green_unless_a_scenario_has_no_verdict():
    before = over(night(cell("eagle", seen()), day=27))
    found = judged(night(cell()), before)
    assert found.outcome is Outcome.PASS
    (group,) = found.of(Status.FIXED)
    assert (group.signature, group.since) == (AHEAD, before.plan.id)
    assert judged(night(cell(unknown=1)), before).of(Status.FIXED) == []


@pytest.mark.parametrize("day", [28, 29])
def test_an_entry_is_an_error_from_the_day_it_expires(day):
    found = judged(
        night(cell("eagle", seen(STOP))),
        known=[entry(expires=datetime.date(2026, 11, 29))],
        today=datetime.date(2026, 11, day),
    )
    assert found.outcome is (Outcome.PASS if day < 29 else Outcome.FAIL)
    assert [("expired on 2026-11-29" in said) for said in found.wrong] == [True] * (day == 29)


def test_an_entry_that_matches_nothing_is_an_error_where_its_cells_ran():
    found = judged(night(cell()), known=[entry()])
    assert found.outcome is Outcome.FAIL
    assert found.wrong == ("known entry F-004 matches nothing tonight: if it is fixed, remove it",)


@pytest.mark.parametrize(
    "other",
    [cell(engine="0.5.23"), cell("eagle/plain", kind="generated"), cell(verdict=Outcome.UNKNOWN, unknown=10)],
    ids=["release", "cell", "unknown"],
)
def test_an_entry_whose_cells_did_not_run_is_not_called_stale(other):
    assert judged(night(other), known=[entry()]).wrong == ()


def test_the_place_of_a_crash_may_be_a_pattern():
    crash = "CRASH:ledger:EXTEND:srt/models/llama_eagle3.py:load_weights"
    known = [entry(signatures=("CRASH:ledger:EXTEND:*/llama_eagle3.py:load_weights",))]
    assert [group.status for group in judged(night(cell("eagle", seen(crash))), known=known).groups] == [Status.KNOWN]
    assert judged(night(cell("eagle", seen(crash))), known=known).wrong == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_entry_is_called_stale_only_on_a_device_where_it_was_seen(device):
    found = judged(night(cell(), device=device), known=[entry(devices=("cuda",))])
    assert bool(found.wrong) == (device == "cuda")


def test_a_finding_that_shows_now_and_then_is_gone_only_when_chance_cannot_explain_it():
    """The rate is that of a scenario: large nights prove more than small ones, and those without a verdict nothing."""
    known = [entry(rate=0.1)]
    assert scenarios_until_gone(0.1) == 44
    assert 0.9**44 < GONE <= 0.9**43
    ten = cell(scenarios=10)
    past = [over(night(cell("eagle", seen(STOP)), day=1)), *(over(night(ten, day=2 + day)) for day in range(3))]
    assert judged(night(cell(scenarios=14, unknown=1, verdict=Outcome.UNKNOWN)), *past, known=known).wrong == ()
    (said,) = judged(night(cell(scenarios=14)), *past, known=known).wrong
    assert "in the last 4 nights" in said
    (said,) = judged(night(cell(scenarios=44)), past[0], known=known).wrong
    assert "tonight" in said


def test_a_cell_that_was_not_reported_or_twice_is_red_and_unknown():
    found = judged(night(cell(), planned=["0.5.13/fixed/eagle", "0.5.13/fixed/tree"]))
    assert found.outcome is Outcome.UNKNOWN
    assert found.incomplete == ("1 cell was planned and not reported: 0.5.13/fixed/tree",)
    assert judged(night(cell(), cell(), planned=["0.5.13/fixed/eagle"])).outcome is Outcome.UNKNOWN
    found = judged(night(cell()))
    assert (found.outcome, found.groups, found.reasons) == (Outcome.PASS, (), ())


@pytest.mark.parametrize(
    ("kind", "scenarios", "unknown", "outcome"),
    [
        ("fixed", 10, 1, Outcome.UNKNOWN),
        ("case", 1, 1, Outcome.UNKNOWN),
        ("generated", 100, 5, Outcome.PASS),
        ("generated", 100, 6, Outcome.UNKNOWN),
        ("generated", 0, 0, Outcome.UNKNOWN),
    ],
)
def test_a_night_with_too_many_unknown_scenarios_is_red_and_never_green(kind, scenarios, unknown, outcome):
    one = night(cell("eagle/plain", kind=kind, scenarios=scenarios, unknown=unknown, reasons=("no engine",)))
    assert judged(one).outcome is outcome


def test_wrong_outweighs_incomplete():
    assert judged(night(cell("eagle", seen()), cell("tree", unknown=1))).outcome is Outcome.FAIL


def test_a_red_night_is_never_a_baseline():
    green = over(night(cell(), day=20))
    red = over(night(cell("eagle", seen()), day=21))
    unknown = over(night(cell(unknown=1), day=22))
    faulty = over(night(cell(), day=23, faults=["shard 2 of 2 is missing"]))
    assert judged(night(cell()), green, red, unknown, faulty).baseline == green.plan.id
    assert judged(night(cell()), red, unknown, faulty).baseline is None


@pytest.mark.parametrize(
    ("other", "how"),
    [
        ({"device": "cuda"}, "device (there cuda, here cpu)"),
        ({"revert": 25015}, "revert (there 25015, here none)"),
        ({"settings": {"cuda_graph": True, "dtype": "float16"}}, "dtype (there float16, here none)"),
    ],
    ids=["device", "revert", "settings"],
)
def test_nights_of_another_kind_are_not_compared_with_and_it_is_said_why(other, how):
    red = over(night(cell("eagle", seen()), day=27, **other))
    found = judged(night(cell()), red)
    assert (found.baseline, found.groups) == (None, ())
    assert found.uncompared == "there is no green night yet"
    green = over(night(cell(), day=26, **other))
    found = judged(night(cell()), over(night(cell(), day=25, revert=26329)), green, red)
    assert found.baseline is None
    assert f"the newest green night before it, {green.plan.id}, is of another kind: " in found.uncompared
    assert found.uncompared.endswith(how)
    assert judged(night(cell(), **other), green).uncompared == ""


def accepted(day, mean):
    """A night whose cell has this mean accept length, over a hundred verifies."""
    twos = round(100 * (mean - 1))
    return night(cell(accepted={1: 100 - twos, 2: twos}), day=day)


def test_an_accept_length_outside_what_green_nights_showed_is_pointed_out_and_decides_nothing():
    past = [over(accepted(10 + number, mean)) for number, mean in enumerate([1.50, 1.52, 1.48, 1.51, 1.49])]
    for mean, moved in ((1.53, False), (1.40, True)):
        found = judged(accepted(28, mean), *past)
        (trend,) = [one for one in found.trends if one.what == "accept length"]
        assert (found.outcome, trend.moved) == (Outcome.PASS, moved)
        assert trend.before.mean == pytest.approx(1.5)
        assert trend.before.deviation == pytest.approx(math.sqrt(sum(x * x for x in (0, 2, 2, 1, 1)) / 4) / 100)


def test_four_nights_are_too_few_to_say_that_something_moved_and_red_ones_do_not_count():
    past = [over(accepted(10 + number, 1.5)) for number in range(4)]
    past.append(over(night(cell("eagle", seen(), accepted={1: 50, 2: 50}), day=20)))
    (trend,) = [one for one in judged(accepted(28, 1.4), *past).trends if one.what == "accept length"]
    assert (trend.moved, trend.before.nights) == (False, 4)


def test_tie_rates_are_tracked_too():
    found = judged(night(cell(ties=3, choices=1000)))
    assert [(one.what, one.tonight) for one in found.trends] == [("accept length", 1.9), ("tie rate", 0.003)]


@pytest.mark.parametrize(
    ("shown", "tried"), [(0, 1), (1, 1), (3, 3), (0, 10), (1, 10), (9, 10), (10, 10), (50, 200), (7, 4040)]
)
def test_intervals_hold_the_true_rate_as_often_as_they_say(shown, tried):
    """By the definition of the interval: for its ends, outcomes as far out are as rare as said."""
    low, high = rates.interval(shown, tried)
    assert 0.0 <= low <= shown / tried <= high <= 1.0
    assert low == 0.0 or rates.at_least(shown, tried, low) == pytest.approx(rates.ALPHA / 2)
    assert high == 1.0 or 1 - rates.at_least(shown + 1, tried, high) == pytest.approx(rates.ALPHA / 2)


@pytest.mark.parametrize(("shown", "tried"), [(0, 0), (2, 1), (-1, 3)])
def test_what_is_no_share_has_no_interval(shown, tried):
    with pytest.raises(ValueError, match="is no share"):
        rates.interval(shown, tried)
