"""Limits follow what a second run measures: errors of the same kind pass at any width and number, others fail."""

import math

import numpy as np
import pytest

from harness.contract.noise import (
    FALSE_ALARMS,
    INCOMPARABLE,
    PRIOR_SPREAD,
    between,
    judge_states,
    measure,
    pooled,
    quantile,
    turned_around,
)

ROUNDING = 2.0**-11


def rows(count, width, *, noise=1e-3, seed=0, spread=0.0, heavy=0.0):
    """truth, own, engine [count,width]: two runs whose errors have the same scales and nothing else in common.

    spread: how sensitivities of rows differ. heavy: two columns are so many times as large and as wrong.
    """
    made = np.random.default_rng(seed)
    columns = np.ones(width)
    columns[:2] += heavy
    truth = made.normal(size=(count, width)) * columns
    scale = noise * np.exp(spread * made.normal(size=(count, 1))) * columns
    own, engine = (truth + scale * made.normal(size=truth.shape) for _ in range(2))
    return truth.astype(np.float32), own.astype(np.float32), engine.astype(np.float32)


def judged(truth, own, engine, tests=None):
    noise = measure(truth, own, rounding=ROUNDING, tests=tests or len(truth))
    return judge_states(engine=engine, truth=truth, own=own, noise=noise)


@pytest.mark.parametrize("width", [64, 512, 4096])
@pytest.mark.parametrize("count", [1, 40, 1000])
@pytest.mark.parametrize("more", [{}, {"heavy": 100.0}, {"spread": 0.4}], ids=["even", "heavy columns", "sensitive"])
def test_errors_of_the_same_kind_pass_at_any_width_and_number_of_rows(width, count, more):
    errors = judged(*rows(count, width, **more))
    assert errors.passed.all()
    assert errors.comparable.all()
    assert (errors.greatest_abs / errors.limit).max() < 0.9  # not by a hair


@pytest.mark.parametrize("width", [64, 512, 4096])
def test_a_row_that_is_wrong_by_little_fails_and_the_better_the_wider(width):
    """An error of the whole row, at 6 times rounding (64 columns) or 3.5 times (512 and more)."""
    truth, own, engine = rows(100, width)
    times = 10 if width == 64 else 3.5
    engine[7] = truth[7] + times * (engine[7] - truth[7])
    assert np.flatnonzero(~judged(truth, own, engine).passed).tolist() == [7]


def test_one_element_out_of_line_fails_and_is_named():
    truth, own, engine = rows(50, 2048)
    engine[3, 1234] += 0.05  # fifty times what rounding does to it
    errors = judged(truth, own, engine)
    assert np.flatnonzero(~errors.passed).tolist() == [3]
    assert (errors.column[3], errors.mismatched[3]) == (1234, 1)
    assert errors.greatest_abs[3] == pytest.approx(0.05, rel=0.1)
    assert errors.greatest_abs[3] > errors.limit[3]


def test_a_neighbours_row_never_passes():
    truth, own, engine = rows(50, 256, noise=0.02)
    assert not judged(truth, own, np.roll(engine, 1, axis=0)).passed.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["engine", "truth", "both"])
def test_what_is_not_finite_fails_on_either_side(bad, side):
    truth, own, engine = rows(20, 64)
    for name, one in (("engine", engine), ("truth", truth)):
        if side in (name, "both"):
            one[5, 3] = bad
    errors = judged(truth, own, engine)
    assert np.flatnonzero(~errors.passed).tolist() == [5] == np.flatnonzero(errors.mismatched).tolist()


def test_a_second_run_that_is_exact_by_luck_does_not_forbid_rounding():
    truth, own, engine = rows(30, 64)
    own[4] = truth[4]
    assert judged(truth, own, engine).passed.all()
    assert judged(truth[4:5], own[4:5], truth[4:5] * (1 + ROUNDING / 4)).passed.all()


def test_rows_that_rounding_makes_indistinct_do_not_count_as_compared():
    errors = judged(*rows(30, 64, noise=0.3))
    assert errors.passed.all()
    assert not errors.comparable.any()
    assert judged(*rows(30, 64, noise=INCOMPARABLE / 30)).comparable.all()


@pytest.mark.parametrize("noise", [1e-3, 0.004])
def test_two_engines_are_held_to_what_they_usually_differ_by(noise):
    """A witness has errors of its own: a wrong row stands out, and wrong rows alone do not pass for noise."""
    _, witness, engine = rows(60, 512, noise=noise)
    sound = between(engine, witness, rounding=ROUNDING, tests=60)
    assert judge_states(engine=engine, truth=witness, own=None, noise=sound).passed.all()
    wrong = engine.copy()
    wrong[5] += 20 * noise * np.random.default_rng(3).normal(size=512)
    found = judge_states(
        engine=wrong, truth=witness, own=None, noise=between(wrong, witness, rounding=ROUNDING, tests=60)
    )
    assert np.flatnonzero(~found.passed).tolist() == [5]
    all_wrong = np.roll(engine, 1, axis=0)
    poisoned = between(all_wrong, witness, rounding=ROUNDING, tests=60)
    assert not judge_states(engine=all_wrong, truth=witness, own=None, noise=poisoned).passed.any()


def test_no_rows_and_rows_of_zeros():
    empty = np.zeros((0, 8), np.float32)
    assert len(judged(empty, empty, empty).passed) == 0
    zeros = np.zeros((3, 8), np.float32)
    assert judged(zeros, zeros, zeros).passed.all()
    assert not judged(zeros, zeros, zeros + 1e-3).passed.any()


def test_limits_grow_with_how_much_is_looked_at_as_an_extreme_value_does():
    assert quantile(1) == pytest.approx(4.753, abs=1e-3)  # one in a million
    few, many = (pooled(np.full(50, 0.01), luck=0.05, floor=1e-4, tests=tests) for tests in (10, 100_000))
    ratio = float(many.allowed(np.asarray([0.01]))[0] / few.allowed(np.asarray([0.01]))[0])
    assert 1.0 < ratio < 1.5
    assert 0 < FALSE_ALARMS <= 1e-6


def test_what_all_rows_differ_by_is_sensitivity_and_a_row_is_held_to_its_own():
    made = np.random.default_rng(1)
    sizes = 0.01 * np.exp(0.5 * made.normal(size=400))
    noise = pooled(sizes, luck=0.1, floor=1e-6, tests=400)
    assert noise.sensitivity == pytest.approx(0.5, rel=0.15)
    low, high = noise.expected(np.asarray([0.002, 0.05]))
    assert low < 0.003
    assert high > 0.04
    alike = pooled(0.01 * np.exp(0.1 * made.normal(size=400)), luck=0.1, floor=1e-6, tests=400)
    assert alike.sensitivity < PRIOR_SPREAD / 2
    assert alike.expected(np.asarray([0.005]))[0] > 0.008  # mostly luck: the typical size counts
    unknown = noise.allowed(np.asarray([math.nan]))[0]
    assert unknown > noise.allowed(np.asarray([noise.typical]))[0]


def test_expected_ties_are_as_many_as_noise_turns_around():
    """Against counting: two runs with Gaussian errors of sixteen logits, and how often their choices differ."""
    made = np.random.default_rng(2)
    logits = made.normal(size=(4000, 64)) * 3
    sigma = 0.1
    chosen = (logits + sigma * made.normal(size=logits.shape)).argmax(axis=1)
    counted = int((chosen != logits.argmax(axis=1)).sum())
    top = -np.sort(-logits, axis=1)[:, :2]
    greatest = np.full(len(logits), 1.8 * sigma)
    expected = turned_around(top[:, 0] - top[:, 1], greatest)
    assert counted < expected < 2 * counted  # an engine may have ALLOWANCE times the errors
