"""Verifies a draft tree: the target's choices, the accepted nodes, and the bonus token.

Sources: speculative decoding (arXiv 2211.17192, 2302.01318), several candidates a step (SpecInfer, arXiv 2305.09781),
EAGLE (arXiv 2401.15077, section 3.3). At temperature 0 a node is accepted when it is what the target would have chosen
after its parent. Above, the target's own distribution is sampled by inverse transform: the children of a node divide
the unit interval in order, each as wide as it is likely; the node's uniform number picks one, or, beyond them all,
refuses them, and the token is drawn from what the target's distribution has left.

Shapes: n nodes, node 0 the root (parent -1); V vocabulary; distributions are float64 and sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from reference.attention import Sight
from reference.model import Drafter, Trunk
from reference.nearness import NOWHERE, Near, farthest, nearest, of_end, spread
from reference.tree import Tree, child_of

#: Branches in one forward have at most this many rows: they do not see each other, but their scores are all there.
BRANCH_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Accepted nodes, root first, and the target's choice at each: tokens[-1] is the bonus; a = len(tokens).

    near: how near the uniform numbers came to deciding otherwise; nowhere without any.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    near: Near = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniforms:
    """Numbers in [0, 1) that decide one round: one a node [n], one for the token after the last accepted node.

    threshold_single, threshold_acc: a child is accepted too where it alone is at least this likely; and the children's
    shares of the unit interval are divided by threshold_acc. Both 1 is exact; less accepts more, and is then no longer
    the target's distribution. rejection: drafts were drawn from the draft's own distribution (see `rejection_walk`).
    """

    nodes: tuple[float, ...]
    final: float
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    rejection: bool = False

    @staticmethod
    def drawn(uniform: Callable[[], float], n: int) -> Uniforms:
        """Fresh numbers for a tree of n nodes."""
        return Uniforms(nodes=tuple(uniform() for _ in range(n)), final=uniform())


T = TypeVar("T")


def grouped(branches: Sequence[T], rows: int) -> list[Sequence[T]]:
    """Branches of at most `rows` rows each, as many together as run in one forward."""
    count = max(1, BRANCH_ROWS // max(1, rows))
    return [branches[start : start + count] for start in range(0, len(branches), count)]


def verify(head: Drafter, trunk: Trunk, trees: Sequence[tuple[int, Tree]]) -> list[tuple[Tensor, Tensor]]:
    """(hidden [n,w], target logits [n,V]) of each (committed length, tree) that hangs on a sequence that was read."""
    most = max((len(tree.tokens) for _, tree in trees), default=0)
    return [answer for group in grouped(trees, most) for answer in _verify(head, trunk, group)]


def _verify(head: Drafter, trunk: Trunk, trees: Sequence[tuple[int, Tree]]) -> list[tuple[Tensor, Tensor]]:
    target, sizes = head.target, [len(tree.tokens) for _, tree in trees]
    states = target.branch(
        trunk,
        torch.tensor([token for _, tree in trees for token in tree.tokens], device=target.device),
        torch.tensor([position for c, tree in trees for position in tree.positions(c)], device=target.device),
        Sight.of([(c, tree.parents) for c, tree in trees], device=target.device),
    )
    hidden, logits = head.features(states), target.logits(states[target.layers])
    return list(zip(torch.split(hidden, sizes), torch.split(logits, sizes), strict=True))


def greedy_walk(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> Walk:
    """tokens, parents, choices: [n] each; choices[s] is the target's argmax after node s."""
    node, nodes = 0, [0]
    while True:
        child = child_of(node, choices[node], tokens, parents)
        if child is None:
            return Walk(nodes=tuple(nodes), tokens=tuple(choices[s] for s in nodes))
        node = child
        nodes.append(node)


def sampled_walk(
    tokens: Sequence[int], parents: Sequence[int], target: np.ndarray, uniforms: Uniforms, *, most: int
) -> Walk:
    """The walk by uniform numbers through a tree (greedy_walk's tokens and parents [n]).

    target [n,V]: its distribution after each node. most: drafted tokens that a round may accept at most, k.
    """
    node, nodes, chosen, near = 0, [0], list[int](), NOWHERE
    left = target[0]
    while len(chosen) < most:
        children = [s for s in range(1, len(tokens)) if parents[s] == node]
        own = [tokens[s] for s in children]
        taken, here = _taken(target[node], own, uniforms.nodes[node], uniforms)
        near = nearest(near, here)
        if taken is None:
            left = target[node].copy()
            left[own] = 0.0
            break
        node = children[taken]
        nodes.append(node)
        chosen.append(tokens[node])
        left = target[node]
    last, here = draw(left, uniforms.final)
    return Walk(nodes=tuple(nodes), tokens=(*chosen, last), near=nearest(near, here))


def _taken(mass: np.ndarray, own: Sequence[int], number: float, uniforms: Uniforms) -> tuple[int | None, Near]:
    """Which of the proposals `own` a number accepts, None for none; and how near another answer was. mass [V]."""
    within, end, near = np.zeros(len(mass)), 0.0, NOWHERE
    for place, token in enumerate(own):
        share, alone = float(mass[token]), np.zeros(len(mass))
        within[token] = alone[token] = 1.0
        end += share / uniforms.threshold_acc
        by_end, by_share = number < end, share >= uniforms.threshold_single
        ways = (
            of_end(abs(end - number), spread(mass, within) / uniforms.threshold_acc),
            of_end(abs(share - uniforms.threshold_single), spread(mass, alone)),
        )
        if share > 0 and (by_end or by_share):
            holding = [way for way, holds in zip(ways, (by_end, by_share), strict=True) if holds]
            return place, nearest(near, farthest(*holding))
        near = nearest(near, *ways)
    return None, near


def rejection_walk(tokens: Sequence[int], target: np.ndarray, drafted: np.ndarray, uniforms: Uniforms) -> Walk:
    """Rejection sampling along a chain (arXiv 2211.17192, section 2.3): node i + 1 was drawn from drafted[i] [k,V].

    It is accepted where the uniform number times its probability there is below the target's; a refused one is
    replaced by a draw from what the target's distribution has above the draft's. tokens [n], the root first;
    target [n,V].
    """
    node, chosen, near, made_of = 0, list[int](), NOWHERE, tuple[np.ndarray, ...]()
    left = target[0]
    for proposal in drafted:
        token, uniform = tokens[node + 1], uniforms.nodes[node]
        alone = np.zeros(len(proposal))
        alone[token] = 1.0
        gap = float(target[node][token] - uniform * proposal[token])
        deviation = np.hypot(spread(target[node], alone), uniform * spread(proposal, alone))
        near = nearest(near, of_end(abs(gap), deviation))
        if gap <= 0:
            left, made_of = np.maximum(target[node] - proposal, 0.0), (target[node], proposal)
            break
        node += 1
        chosen.append(token)
        left = target[node]
    last, here = draw(left, uniforms.final, made_of)
    return Walk(nodes=tuple(range(node + 1)), tokens=(*chosen, last), near=nearest(near, here))


def draw(mass: np.ndarray, uniform: float, made_of: Sequence[np.ndarray] = ()) -> tuple[int, Near]:
    """The token in whose share of the mass [V], laid out in order, the number lies; and how near that share's ends are.

    Distances are probability of the whole mass. A number beyond the sum, by rounding, means the last possible token.
    made_of: the distributions [V] whose difference the mass is, where it is no distribution's own.
    """
    if not (mass > 0).any():
        raise ValueError("there is no mass to draw from; expected a distribution with some token left")
    ends = np.cumsum(mass)
    total, place = float(ends[-1]), uniform * float(ends[-1])
    token = int(np.searchsorted(ends, place, side="right"))
    if token == len(ends):
        return int(np.flatnonzero(mass > 0)[-1]), of_end(0.0, 0.0)
    sides = ((token, ends[token] - mass[token]), (token + 1, ends[token]))
    near = (
        of_end(abs(place - end) / total, _end_spread(mass / total, upto, made_of) / (total if made_of else 1.0))
        for upto, end in sides
    )
    return token, nearest(*near)


def _end_spread(mass: np.ndarray, upto: int, made_of: Sequence[np.ndarray]) -> float:
    """Of what lies in front of token `upto`, of all the mass: see draw; mass [V] sums to 1."""
    weights = (np.arange(len(mass)) < upto) - mass[:upto].sum()
    weights[mass <= 0] = 0.0
    return float(np.linalg.norm([spread(one, weights) for one in made_of or (mass,)]))
