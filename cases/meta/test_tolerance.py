"""Each policy passes what it should and fails what it should; a NaN never passes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract import tolerance
from harness.contract.noise import TIE_MULTIPLE
from harness.contract.tolerance import BUDGETS, budget_for, choice_margin, judge_rows, tie_limit, too_many_ties

F32 = budget_for("float32")


def row(*values):
    return np.asarray([values], dtype=np.float32)


def passes(engine, truth, **more):
    return bool(judge_rows(engine=engine, truth=truth, budget=F32, **more).passed[0])


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8))
def test_equal_rows_pass(values):
    assert passes(row(*values), row(*values))


NAN, INF, NONE = float("nan"), float("inf"), np.zeros((1, 0), np.float32)


@pytest.mark.parametrize(
    ("engine", "truth", "allowed", "passed"),
    [
        (row(100.0, 0.005), row(100.0, 0.0), None, True),  # an error is measured against the row's largest value
        (row(1.0, 0.005), row(1.0, 0.0), None, False),
        (row(F32.floor / 2), row(0.0), None, True),
        (row(F32.floor * 2), row(0.0), None, False),
        (row(1.0, 1.00008), row(1.0, 1.0), None, True),
        (row(1.0, 1.00008), row(1.0, 1.0), 1e-5, False),  # where an error was measured, that is the limit
        (row(1.0, 1.00008), row(1.0, 1.0), NAN, True),  # and the wide one where none was
        (NONE, NONE, None, True),
        *((row(1.0, bad), row(1.0, 2.0), None, False) for bad in (NAN, INF, -INF)),
        *((row(1.0, 2.0), row(1.0, bad), None, False) for bad in (NAN, INF, -INF)),
        *((row(1.0, bad), row(1.0, bad), None, False) for bad in (NAN, INF, -INF)),
    ],
)
def test_a_row_passes_only_within_its_budget_and_never_where_it_is_not_finite(engine, truth, allowed, passed):
    assert passes(engine, truth, allowed=None if allowed is None else np.asarray([allowed])) is passed


def test_report_says_how_many_elements_and_where():
    errors = judge_rows(engine=row(1.0, 3.0, 1.5), truth=row(1.0, 1.0, 1.0), budget=F32)
    assert (int(errors.column[0]), int(errors.mismatched[0])) == (1, 2)
    assert errors.greatest_abs[0] == 2.0


def margin(expected, observed):
    ids, logits = np.asarray([5, 9, 2]), np.asarray([8.0, 7.99999, 3.0], np.float32)
    return choice_margin(top_ids=ids, top_logits=logits, expected=expected, observed=observed)


@pytest.mark.parametrize(("observed", "tie"), [(9, True), (2, False), (77, False)], ids=["near", "clear", "unrecorded"])
def test_only_a_near_choice_that_was_recorded_is_a_tie(observed, tie):
    assert (margin(5, observed) < tie_limit(scale=8.0, budget=F32)) is tie
    assert (margin(5, observed) == float("inf")) is (observed == 77)


@pytest.mark.parametrize(("margin", "scale"), [(0.0, float("nan")), (0.0, float("inf")), (float("nan"), 8.0)])
def test_what_is_not_finite_is_no_tie(margin, scale):
    assert not margin < tie_limit(scale=scale, budget=F32)


F16 = BUDGETS["float16"]


def test_a_tie_is_as_wide_as_what_rounding_does_to_the_row():
    assert tie_limit(scale=10.0, budget=F16, noise=0.02) == pytest.approx(TIE_MULTIPLE * 0.02)
    assert tie_limit(scale=10.0, budget=F16) == pytest.approx(4 * 10 * 2 * 2.0**-10)
    assert tie_limit(scale=float("inf"), budget=F16, noise=0.02) == 0.0


@pytest.mark.parametrize(
    ("usual", "ties", "too_many"),
    [(0.5, 3, False), (10, 30, True), (10, 10, False), (0.0, tolerance.TIES_ALWAYS_ALLOWED, False), (0.1, 30, True)],
)
def test_ties_have_a_limit_of_their_own(usual, ties, too_many):
    assert too_many_ties(ties=ties, usual=usual) is too_many


#: (dtype, candidates a step, ties, choices) of whole clean runs on a GPU, and of their worst scenario.
CLEAN = [
    ("float16", 2, 33, 5749),
    ("float16", 4, 41, 3056),
    ("float16", 4, 8, 306),
    ("float16", 8, 413, 27193),
    ("float16", 8, 32, 1259),
    ("bfloat16", 2, 247, 5344),
    ("bfloat16", 4, 249, 3019),
    ("bfloat16", 8, 2924, 27423),
    ("bfloat16", 8, 202, 1607),
]


@pytest.mark.parametrize(("dtype", "topk", "ties", "choices"), CLEAN)
def test_clean_runs_of_every_width_have_no_more_ties_than_usual_and_thrice_as_many_are_too_many(
    dtype, topk, ties, choices
):
    usual = budget_for(dtype).tie_rate(topk) * choices
    assert not too_many_ties(ties=ties, usual=usual)
    assert too_many_ties(ties=3 * ties + 12, usual=usual)


def test_a_wide_draft_has_the_rate_of_the_widest_that_was_measured():
    assert budget_for("bfloat16").tie_rate(64) == budget_for("bfloat16").tie_rate(8)
    assert budget_for("float16").tie_rate(3) == budget_for("float16").tie_rate(1)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=list(BUDGETS))
def test_budgets_are_wider_than_rounding_and_narrower_than_a_wrong_row(budget):
    assert budget.numerical_floor * tolerance.UNMEASURED_TIE < budget.relative < 0.2
    assert budget.reason
