"""How far apart two selections of a tree are, and that only near ones are ties."""

import math

import pytest

from harness.checks.selection import NEVER, Candidate, Round, beam_gap, tree_gap


def candidate(token, parent, probability):
    return Candidate(token=token, parent=parent, value=math.log(probability))


@pytest.fixture
def proposed():
    """Two first proposals, 10 and 11; each proposes two more: values 0.6, 0.3, then 0.36, 0.12, 0.15, 0.1."""
    found = Round(candidates=[candidate(10, -1, 0.6), candidate(11, -1, 0.3)], levels=[[0, 1]], beams=[[0, 1]])
    found.candidates += [candidate(20, 0, 0.36), candidate(21, 0, 0.12), candidate(20, 1, 0.15), candidate(22, 1, 0.1)]
    found.levels.append([2, 3, 4, 5])
    return found


def test_the_best_selection_has_no_gap(proposed):
    # root, 10, 11, 10-20, 11-20: the four greatest values
    assert tree_gap(proposed, [9, 10, 11, 20, 20], [-1, 0, 0, 1, 2]) <= 0.0
    assert beam_gap(proposed, 0) == 0.0


def test_a_worse_candidate_costs_what_it_is_worse_by(proposed):
    # 10-21 (0.12) instead of 11-20 (0.15)
    gap = tree_gap(proposed, [9, 10, 11, 20, 21], [-1, 0, 0, 1, 1])
    assert gap == pytest.approx(math.log(0.15 / 0.12))


def test_beams_in_another_order_cost_their_difference(proposed):
    proposed.beams[0] = [1, 0]
    assert beam_gap(proposed, 0) == pytest.approx(math.log(0.6 / 0.3))


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([9, 10, 11, 20, 99], [-1, 0, 0, 1, 2]),  # never proposed
        ([9, 10, 11, 22, 20], [-1, 0, 0, 1, 2]),  # proposed by the other beam
        ([9, 11, 10, 20, 20], [-1, 0, 0, 2, 1]),  # not in the order proposed
        ([9, 10, 11, 20, 20], [-1, 0, 0, 7, 2]),  # no such parent
    ],
)
def test_what_is_no_tree_of_candidates_is_never_a_tie(proposed, tokens, parents):
    assert tree_gap(proposed, tokens, parents) == NEVER
