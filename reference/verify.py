"""Greedy verification of a draft tree: follow the target's own choices as long as the tree holds them.

Source: speculative decoding at temperature 0 (EAGLE arXiv 2401.15077, section 3.3): a node is accepted when it is
what the target would have chosen after its parent; the choice after the last accepted node is the bonus token.
This module must not run a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Accepted nodes, root first, and the target's choice at each: tokens[-1] is the bonus; a = len(tokens)."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


def greedy_walk(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> Walk:
    """tokens, parents, choices: [n] each, node 0 the root (parent -1), choices[s] the target's argmax after node s."""
    node, nodes = 0, [0]
    while True:
        matching = (s for s in range(1, len(tokens)) if parents[s] == node and tokens[s] == choices[node])
        child = next(matching, None)
        if child is None:
            return Walk(nodes=tuple(nodes), tokens=tuple(choices[s] for s in nodes))
        node = child
        nodes.append(node)
