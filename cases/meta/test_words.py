"""Counts in sentences are grammatical, wherever one is one."""

from __future__ import annotations

import re

import pytest

from cases.meta import results
from cases.meta.test_terminal import printed
from harness.contract.usage import meant
from harness.contract.words import brief, counted
from reports.terminal import render_run


@pytest.mark.parametrize(("number", "said"), [(0, "0 scenarios"), (1, "1 scenario"), (2, "2 scenarios")])
def test_one_is_singular(number, said):
    assert counted(number, "scenario") == said


@pytest.mark.parametrize("break_it", [results.sound, results.one_ahead, results.chunk_tail])
def test_a_run_of_one_scenario_speaks_of_one_scenario(break_it):
    text = printed(render_run, results.run_of(results.judged("single", break_it)))
    assert not re.search(r"\b1 (scenarios|cells|mutants|findings|engine boots|draft chains)\b", text), text


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
        ("newest", ["0.5.12.post1", "0.5.23"], ""),
        ("x", [], ""),
    ],
)
def test_only_a_slip_of_the_hand_is_answered_with_a_suggestion(typed, names, near):
    assert meant(typed, names) == (f"; did you mean {near!r}?" if near else "")
