"""Each policy passes what it should and fails what it should; a NaN never passes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.contract import tolerance
from harness.contract.tolerance import (
    BUDGETS,
    budget_for,
    choice_margin,
    is_tie,
    judge_rows,
    tie_limit,
    too_many_ties,
)

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
    ("engine", "truth", "own", "passed"),
    [
        (row(100.0, 0.005), row(100.0, 0.0), None, True),  # an error is measured against the row's largest value
        (row(1.0, 0.005), row(1.0, 0.0), None, False),
        (row(F32.floor / 2), row(0.0), None, True),
        (row(F32.floor * 2), row(0.0), None, False),
        (row(1.0, 1.00008), row(1.0, 1.0), None, True),
        (row(1.0, 1.00008), row(1.0, 1.0), row(1.0, 1.0), False),  # a run in its own dtype can only tighten
        (row(1.0, 2.0), row(1.0, 1.0), row(1.0, 5.0), False),
        (NONE, NONE, None, True),
        *((row(1.0, bad), row(1.0, 2.0), None, False) for bad in (NAN, INF, -INF)),
        *((row(1.0, 2.0), row(1.0, bad), None, False) for bad in (NAN, INF, -INF)),
        *((row(1.0, bad), row(1.0, bad), None, False) for bad in (NAN, INF, -INF)),
    ],
)
def test_a_row_passes_only_within_its_budget_and_never_where_it_is_not_finite(engine, truth, own, passed):
    assert passes(engine, truth, own=own) is passed


def test_report_says_how_many_elements_and_where():
    errors = judge_rows(engine=row(1.0, 3.0, 1.5), truth=row(1.0, 1.0, 1.0), budget=F32)
    assert (int(errors.column[0]), int(errors.mismatched[0])) == (1, 2)
    assert errors.greatest_abs[0] == 2.0


def margin(expected, observed):
    ids, logits = np.asarray([5, 9, 2]), np.asarray([8.0, 7.99999, 3.0], np.float32)
    return choice_margin(top_ids=ids, top_logits=logits, expected=expected, observed=observed)


@pytest.mark.parametrize(("observed", "tie"), [(9, True), (2, False), (77, False)], ids=["near", "clear", "unrecorded"])
def test_only_a_near_choice_that_was_recorded_is_a_tie(observed, tie):
    assert is_tie(margin=margin(5, observed), scale=8.0, budget=F32) is tie
    assert (margin(5, observed) == float("inf")) is (observed == 77)


@pytest.mark.parametrize(("margin", "scale"), [(0.0, float("nan")), (0.0, float("inf")), (float("nan"), 8.0)])
def test_what_is_not_finite_is_no_tie(margin, scale):
    assert not is_tie(margin=margin, scale=scale, budget=F32)


F16 = BUDGETS["float16"]


def test_a_row_is_held_to_what_a_run_in_the_engines_dtype_does():
    truth = np.asarray([[4.0, -2.0]], dtype=np.float32)
    own = truth + np.float32(0.01)
    within, beyond = truth + np.float32(0.03), truth + np.float32(0.06)
    assert judge_rows(engine=within, truth=truth, own=own, budget=F16).passed.all()
    assert not judge_rows(engine=beyond, truth=truth, own=own, budget=F16).passed.any()
    assert judge_rows(engine=beyond, truth=truth, budget=F16).passed.all()  # without such a run only the wide limit


def test_a_run_that_is_exact_by_luck_does_not_forbid_rounding():
    truth = np.asarray([[8.0]], dtype=np.float32)
    half_ulp = np.asarray([[8.0 + 2.0**-8]], dtype=np.float32)
    assert judge_rows(engine=half_ulp, truth=truth, own=truth, budget=F16).passed.all()


def test_an_error_that_is_not_known_leaves_the_wide_limit():
    truth, engine = np.asarray([[4.0], [4.0]]), np.asarray([[4.06], [4.06]])
    judged = judge_rows(engine=engine, truth=truth, own_error=np.asarray([0.01, np.nan]), budget=F16)
    assert judged.passed.tolist() == [False, True]


def test_a_tie_is_as_wide_as_the_rows_own_rounding():
    assert tie_limit(scale=10.0, budget=F16, own_error=0.02) == pytest.approx(0.08)
    assert tie_limit(scale=10.0, budget=F16, own_error=0.0) == pytest.approx(4 * 10 * 2.0**-11)
    assert tie_limit(scale=10.0, budget=F16) == pytest.approx(4 * 10 * 2 * 2.0**-10)
    assert tie_limit(scale=float("inf"), budget=F16, own_error=0.02) == 0.0


@pytest.mark.parametrize(
    ("budget", "ties", "choices", "too_many"),
    [
        (F16, 3, 54, False),  # ties in lumps are chance
        (F16, 30, 1000, True),
        (F16, 10, 1000, False),
        (F32, tolerance.TIES_ALWAYS_ALLOWED, 3, False),
        (F32, 30, 100, True),
        (F32, 30, 100_000, False),
    ],
)
def test_ties_have_a_limit_of_their_own(budget, ties, choices, too_many):
    assert too_many_ties(ties=ties, choices=choices, budget=budget) is too_many


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
    budget = budget_for(dtype)
    assert not too_many_ties(ties=ties, choices=choices, budget=budget, topk=topk)
    assert too_many_ties(ties=3 * ties + 12, choices=choices, budget=budget, topk=topk)


def test_a_wide_draft_has_the_rate_of_the_widest_that_was_measured():
    assert budget_for("bfloat16").tie_rate(64) == budget_for("bfloat16").tie_rate(8)
    assert budget_for("float16").tie_rate(3) == budget_for("float16").tie_rate(1)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=list(BUDGETS))
def test_budgets_are_wider_than_rounding_and_narrower_than_a_wrong_row(budget):
    assert budget.numerical_floor * tolerance.TIE_MULTIPLE < budget.relative < 0.2
    assert budget.reason
