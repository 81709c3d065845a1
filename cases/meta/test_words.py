"""Counts in sentences are grammatical, wherever one is one."""

from __future__ import annotations

import pytest

from harness.contract.usage import meant
from harness.contract.words import brief, counted, percent, some


def test_one_is_singular():
    assert [counted(number, "scenario") for number in range(3)] == ["0 scenarios", "1 scenario", "2 scenarios"]


@pytest.mark.parametrize(
    ("part", "whole", "digits", "said"), [(1, 2, 0, "50 %"), (1, 3, 2, "33.33 %"), (0, 0, 0, "-"), (0.0, 0.0, 1, "-")]
)
def test_a_share_of_nothing_is_a_dash(part, whole, digits, said):
    assert percent(part, whole, digits) == said


@pytest.mark.parametrize(
    ("names", "said"), [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_a_long_list_is_cut_and_the_rest_counted(names, said):
    assert some(names, 2) == said


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("", ""),
        ("no engine", "no engine"),
        ("no engine\n  look", "no engine"),
        ("it ends with:\n  Traceback\n  No module", "it ends with: No module"),
    ],
)
def test_a_reason_in_one_line_names_the_end_of_the_log(reason, said):
    assert brief(reason) == said


@pytest.mark.parametrize(
    ("typed", "names", "near"),
    [
        ("pr2501", ["pr25015", "pr26329"], "pr25015"),
        ("kk", ["k", "t", "n"], "k"),
        ("trees", ["tree", "paged"], "tree"),
        ("pr9", ["pr25015", "pr26329"], ""),
        ("95", ["x-009", "x-095", "x-195"], "x-095"),
        ("X-95", ["x-009", "x-095"], "x-095"),
        ("5", ["x-095"], ""),
    ],
)
def test_only_a_slip_of_the_hand_is_answered_with_a_suggestion(typed, names, near):
    assert meant(typed, names) == (f"; did you mean {near!r}?" if near else "")
