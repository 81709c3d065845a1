"""The search over versions: any window, any versions that cannot be judged, failures that come and go. No engine."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.bisect.search import EndUnknown, NoChange, Releases, Tried, search
from harness.bisect.trials import CONFIDENCE, MOST_TRIES, Rate, Trials
from harness.bisect.verdicts import Cache, Failure, Run
from harness.contract.types import Outcome

FAILURE = Failure(kinds=("POSITION",))
PASSES = Run(outcome=Outcome.PASS)
FAILS = Run(outcome=Outcome.FAIL, kinds=("POSITION",), signatures=("POSITION:positions:DRAFT:one-ahead",))


@st.composite
def lines(draw):
    """(direction, number of versions, the first version after the change, versions that cannot be judged)."""
    direction = draw(st.sampled_from(["broken", "fixed"]))
    count = draw(st.integers(2, 60))
    change = draw(st.integers(1, count - 1))
    unknown = draw(st.sets(st.integers(1, count - 2))) if count > 2 else set()
    return direction, count, change, unknown


def releases(count):
    return Releases(names=tuple(str(at) for at in range(count)))


def judged(direction, change, unknown, asked=None):
    """A judge that knows the truth; it notes in `asked` what it was asked."""
    old, new = ("good", "bad") if direction == "broken" else ("bad", "good")

    def judge(name):
        at = int(name)
        if asked is not None:
            asked.append(at)
        call = "unknown" if at in unknown else new if at >= change else old
        return Tried(name=name, call=call, why="")

    return judge


@given(lines())
def test_the_answer_encloses_the_change_as_tightly_as_what_can_be_judged_allows(line):
    direction, count, change, unknown = line
    found = search(releases(count), judged(direction, change, unknown), direction=direction)
    known = sorted(set(range(count)) - unknown)
    assert int(found.old) == max(at for at in known if at < change)
    assert int(found.new) == min(at for at in known if at >= change)
    assert [int(name) for name in found.between] == list(range(int(found.old) + 1, int(found.new)))
    assert found.exact == (int(found.new) - int(found.old) == 1)
    named = (found.last_good, found.first_bad, found.last_bad, found.first_good)
    expected = (found.old, found.new, None, None) if direction == "broken" else (None, None, found.old, found.new)
    assert named == expected


@given(lines())
def test_no_version_is_judged_twice_and_few_are_judged_at_all(line):
    direction, count, change, unknown = line
    asked = []
    found = search(releases(count), judged(direction, change, unknown, asked), direction=direction)
    assert len(asked) == len(set(asked))
    assert [int(one.name) for one in found.tried] == asked
    met = len(unknown & set(asked))
    assert len(asked) - met <= 2 + math.ceil(math.log2(max(count - 1, 1))) + met


def test_the_bad_end_is_judged_first_whichever_it_is():
    for direction, bad in (("broken", 4), ("fixed", 0)):
        asked = []
        search(releases(5), judged(direction, 2, set(), asked), direction=direction)
        assert asked[0] == bad


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ({"0": "bad", "1": "bad"}, "no change between 0 and 1: both show the failure"),
        ({"0": "good", "1": "good"}, "no change between 0 and 1: both pass"),
        ({"0": "good", "1": "bad"}, "the ends are the wrong way round: 0 passes and 1 shows the failure"),
    ],
)
def test_ends_that_are_not_what_they_were_named_for_are_no_answer(calls, said):
    with pytest.raises(NoChange, match=said) as caught:
        search(releases(2), lambda name: Tried(name=name, call=calls[name], why=""), direction="fixed")
    assert {one.name: one.call for one in caught.value.tried} == calls


def test_an_end_that_cannot_be_judged_is_named_with_its_reason():
    def judge(name):
        return Tried(name=name, call="unknown" if name == "1" else "bad", why="would not start")

    with pytest.raises(EndUnknown, match="1, the good end, cannot be judged: would not start"):
        search(releases(2), judge, direction="fixed")


# --- failures that come and go


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
def test_the_lower_bound_is_where_so_many_failures_become_improbable(counts):
    failures, tries = counts
    low = Rate(failures=failures, tries=tries).lower
    tail = sum(math.comb(tries, k) * low**k * (1 - low) ** (tries - k) for k in range(failures, tries + 1))
    assert tail == pytest.approx(1 - CONFIDENCE, abs=1e-9)
    assert low < failures / tries
    assert Rate(failures=0, tries=tries).lower == 0.0


@given(st.integers(1, 20), st.integers(0, 20), st.floats(1e-6, 0.5))
def test_so_many_tries_bring_the_risk_below_what_was_asked(failures, passes, risk):
    rate = Rate(failures=failures, tries=failures + passes)
    tries = rate.tries_for(risk)
    assert 1 <= tries <= MOST_TRIES
    if tries < MOST_TRIES:
        assert rate.risk(tries) <= risk
    if tries > 1:
        assert rate.risk(tries - 1) > risk


def flaky_search(tmp_path, *, rate, change, count, repeat, seed):
    """A search whose bad versions fail in `rate` of their runs; (answer or None, whether it is right)."""
    chance = random.Random(seed)
    trials = Trials(failure=FAILURE, cache=Cache(folder=tmp_path), repeat=repeat)

    def judge(name):
        bad = int(name) < change
        return trials.judge(name, identity=None, one_run=lambda: FAILS if bad and chance.random() < rate else PASSES)

    try:
        found = search(releases(count), judge, direction="fixed")
    except NoChange:
        return None, False
    return found, int(found.new) == change


@settings(max_examples=12, deadline=None)
@given(rate=st.floats(0.25, 0.9), repeat=st.integers(3, 12), change=st.integers(1, 15), seed=st.integers(0, 2**32))
def test_a_flaky_failure_misleads_the_search_no_more_often_than_it_says(tmp_path_factory, rate, repeat, change, seed):
    """The stated risk uses a 95 % lower bound for the rate, so on average it is above the share of wrong answers."""
    folder = tmp_path_factory.mktemp("cache")
    runs = [
        flaky_search(folder, rate=rate, change=change, count=16, repeat=repeat, seed=seed + number)
        for number in range(300)
    ]
    answers = [(found, right) for found, right in runs if found is not None]
    wrong = sum(not right for _, right in answers)
    stated = sum(found.risk for found, _ in answers)
    spread = 3 * math.sqrt(max(stated, 1.0))
    assert wrong <= stated + spread


def test_a_steady_failure_is_searched_with_one_run_each_and_no_risk_is_claimed(tmp_path):
    found, right = flaky_search(tmp_path, rate=1.0, change=5, count=16, repeat=None, seed=0)
    assert right
    assert {one.tries for one in found.tried} == {1}
    assert found.risk == 0.0


def test_a_failure_seen_at_once_is_certain_and_only_passes_are_repeated(tmp_path):
    found, right = flaky_search(tmp_path, rate=1.0, change=5, count=16, repeat=4, seed=0)
    assert right
    tries = {one.name: one.tries for one in found.tried}
    assert tries["0"] == 4, "the bad end measures the rate"
    assert all(one.tries == (4 if one.call == "good" else 1) for one in found.tried if one.name != "0")
    each = Rate(failures=4, tries=4).risk(4)
    assert found.risk == pytest.approx(each * sum(one.call == "good" for one in found.tried))
