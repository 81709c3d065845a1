"""How near a draw came to another outcome, against errors put into logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.contract.requests import RequestSpec
from reference.choices import decide, first
from reference.engine_view import Conditions
from reference.logit_rules import Rules
from reference.nearness import Near, farthest, nearest, of_end, of_logits, spread
from reference.tree import with_depths
from reference.verify import Uniforms, draw, rejection_walk, sampled_walk

#: Logits of a peaked and of a flat distribution, and how large the errors are.
ROWS = {"peaked": np.array([3.0, 2.0, 0.5, -1.0]), "flat": np.linspace(0.0, 0.5, 400)}
ERROR = 1e-3


def softmax(logits):
    found = np.exp(logits - logits.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def moved(value, *rows):
    """Standard deviation of value(*distributions) over independent errors in the logits, for errors of size 1."""
    random = np.random.default_rng(3)
    several = [[softmax(row + ERROR * random.standard_normal(row.shape)) for row in rows] for _ in range(3000)]
    return np.std([value(*each) for each in several]) / ERROR


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_end_moves_as_far_as_errors_in_logits_move_it(row):
    within = np.arange(len(row)) < len(row) // 2
    assert spread(softmax(row), within * 1.0) == pytest.approx(moved(lambda one: one[within].sum(), row), rel=0.05)
    # a token lies between two ends: the number is put beside the upper one
    mass = softmax(row)
    token, near = draw(mass, float(mass[within].sum()) - 1e-6)
    assert token == len(row) // 2 - 1
    assert near.spread == pytest.approx(spread(mass, within * 1.0))
    assert near.margin == pytest.approx(1e-6)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_a_refused_draft_leaves_moves_with_both_distributions(row):
    other = row[::-1].copy()
    mass = np.maximum(softmax(row) - softmax(other), 0.0)
    kept = np.flatnonzero(mass)
    upto = kept[len(kept) // 2 - 1] + 1

    def end(one, two):
        left = np.maximum(one - two, 0.0)
        return left[:upto].sum() / left.sum()

    place = float(end(softmax(row), softmax(other))) - 1e-9
    near = draw(mass, place, (softmax(row), softmax(other)))[1]
    assert near.spread == pytest.approx(moved(end, row, other), rel=0.05)


def test_the_first_proposal_after_the_number_decides_and_the_one_before():
    """Shares 0.4 and 0.3 of a root's two children; a number that takes the second is between their two ends."""
    row = np.array([[0.1, 0.4, 0.3, 0.2]] * 3)
    walk = sampled_walk((9, 1, 2), (-1, 0, 0), row, Uniforms(nodes=(0.45, 0.5, 0.5), final=0.25), most=1)
    assert walk.tokens[0] == 2
    first = np.array([0.0, 1.0, 0.0, 0.0])
    assert walk.near.margin == pytest.approx(0.05)
    assert (walk.near.distance, walk.near.spread) == pytest.approx((0.05, spread(row[0], first)))


def test_a_share_near_its_threshold_is_as_near_as_a_number_near_an_end():
    row = np.array([[0.1, 0.4, 0.3, 0.2]] * 2)
    numbers = Uniforms(nodes=(0.7, 0.9), final=0.25, threshold_single=0.4001)
    walk = sampled_walk((9, 1), (-1, 0), row, numbers, most=1)
    assert walk.tokens == (2,)
    assert walk.near.margin == pytest.approx(0.0001)
    wide = replace(numbers, nodes=(0.75, 0.9), threshold_single=1.0, threshold_acc=0.5)
    near = sampled_walk((9, 1), (-1, 0), row, wide, most=1).near  # the share ends at 0.8
    assert (near.distance, near.spread) == pytest.approx((0.05, 2 * spread(row[0], np.eye(4)[1])))
    both = replace(numbers, nodes=(0.1, 0.9), threshold_single=0.3999)  # what two ways accept takes both to refuse
    assert sampled_walk((9, 1), (-1, 0), row, both, most=1).near.margin > 0.1


def test_a_ratio_moves_with_both_distributions():
    one, two = np.array([1.0, 0.2, -0.5]), np.array([0.0, 0.8, 0.1])
    numbers = Uniforms(nodes=(0.5, 0.5), final=0.5, rejection=True)
    p, q = softmax(one), softmax(two)
    near = rejection_walk((9, 1), np.stack([p, p]), np.stack([q]), numbers).near
    deviation = moved(lambda p, q: p[1] - 0.5 * q[1], one, two)
    assert (near.distance, near.spread) == pytest.approx((abs(p[1] - 0.5 * q[1]), deviation), rel=0.05)


def test_near_is_told_by_what_errors_reach_first_and_never_where_nothing_moves():
    flat, peaked = of_end(1e-4, 1e-6), of_end(1e-2, 0.25)
    assert nearest(flat, peaked) == Near(margin=1e-4, distance=1e-2, spread=0.25)
    assert farthest(flat, peaked) == Near(margin=1e-2, distance=1e-4, spread=1e-6)
    assert of_end(0.0, 0.0).reach == np.inf
    assert of_logits(0.2).reach == pytest.approx(0.2)
    assert of_end(0.1, 0.5).at(2.0).reach == pytest.approx(2 * of_end(0.1, 0.5).reach)


def test_errors_count_before_a_temperature_divides_them():
    """The same distribution made of logits twice as large: their errors reach half as far."""
    row, tree = torch.tensor([[1.0, 0.4, 0.2, 0.0]] * 2, dtype=torch.float64), with_depths((9, 0), (-1, 0))
    numbers = Conditions(uniforms=Uniforms(nodes=(0.3, 0.3), final=0.3))
    nears = []
    for temperature in (1.0, 2.0):
        request = RequestSpec(rid="a", input_ids=(1, 2), temperature=temperature, top_p=0.9)
        rules = Rules(request=request)
        decided = decide(tree, row * temperature, numbers, rules, (), most=1, drafted=np.zeros((1, 4)))
        nears += [decided.walk.near, first(row[0] * temperature, rules, (), None).walk.near]
    for one, other in zip(nears[:2], nears[2:], strict=True):
        assert (other.margin, other.spread) == pytest.approx((one.margin, one.spread / 2))
    cut = Rules(request=RequestSpec(rid="a", input_ids=(1, 2), temperature=1.0, top_p=0.9)).distribution(row[0], ())[1]
    whole = decide(
        tree,
        row,
        numbers,
        Rules(request=RequestSpec(rid="a", input_ids=(1,), temperature=1.0)),
        (),
        most=1,
        drafted=np.zeros((1, 4)),
    )
    assert cut.margin < whole.walk.near.margin, "the cut is to be the nearest"
    assert nears[0].margin == cut.margin
