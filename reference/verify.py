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
from reference.tree import Tree

#: Branches in one forward have at most this many rows: they do not see each other, but their scores are all there.
BRANCH_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Accepted nodes, root first, and the target's choice at each: tokens[-1] is the bonus; a = len(tokens).

    margin: how far the nearest uniform number was from deciding otherwise, as probability; infinite without any.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    margin: float = float("inf")


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
        matching = (s for s in range(1, len(tokens)) if parents[s] == node and tokens[s] == choices[node])
        child = next(matching, None)
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
    node, nodes, chosen, margin = 0, [0], list[int](), 1.0
    left = target[0]
    while len(chosen) < most:
        children = [s for s in range(1, len(tokens)) if parents[s] == node]
        own = [tokens[s] for s in children]
        shares = target[node][own]
        ends, number = np.cumsum(shares) / uniforms.threshold_acc, uniforms.nodes[node]
        margin = min([margin, *np.abs(ends - number).tolist()])
        accepted = (shares > 0) & ((number < ends) | (shares >= uniforms.threshold_single))
        if not accepted.any():
            left = target[node].copy()
            left[own] = 0.0
            break
        node = children[int(accepted.argmax())]
        nodes.append(node)
        chosen.append(tokens[node])
        left = target[node]
    last, gap = draw(left, uniforms.final)
    return Walk(nodes=tuple(nodes), tokens=(*chosen, last), margin=min(margin, gap))


def rejection_walk(tokens: Sequence[int], target: np.ndarray, drafted: np.ndarray, uniforms: Uniforms) -> Walk:
    """Rejection sampling along a chain (arXiv 2211.17192, section 2.3): node i + 1 was drawn from drafted[i] [k,V].

    It is accepted where the uniform number times its probability there is below the target's; a refused one is
    replaced by a draw from what the target's distribution has above the draft's. tokens [n], the root first;
    target [n,V].
    """
    node, chosen, margin = 0, list[int](), 1.0
    left = target[0]
    for proposal in drafted:
        token = tokens[node + 1]
        gap = float(target[node][token] - uniforms.nodes[node] * proposal[token])
        margin = min(margin, abs(gap))
        if gap <= 0:
            left = np.maximum(target[node] - proposal, 0.0)
            break
        node += 1
        chosen.append(token)
        left = target[node]
    last, nearest = draw(left, uniforms.final)
    return Walk(nodes=tuple(range(node + 1)), tokens=(*chosen, last), margin=min(margin, nearest))


def draw(mass: np.ndarray, uniform: float) -> tuple[int, float]:
    """The token in whose share of the mass [V], laid out in order, the number lies; and how far from that share's ends.

    The distance is probability of the whole mass. A number beyond the sum, by rounding, means the last possible token.
    """
    if not (mass > 0).any():
        raise ValueError("there is no mass to draw from; expected a distribution with some token left")
    ends = np.cumsum(mass)
    total, place = float(ends[-1]), uniform * float(ends[-1])
    token = int(np.searchsorted(ends, place, side="right"))
    if token == len(ends):
        return int(np.flatnonzero(mass > 0)[-1]), 0.0
    return token, float(min(place - (ends[token] - mass[token]), ends[token] - place) / total)
