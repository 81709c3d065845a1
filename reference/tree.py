"""Builds the verified tree from everything the draft proposed.

Source: EAGLE-2 (arXiv 2406.16858) section 4.2, reranking: the n-1 best candidates over all depths, by the value of
their path, put back in the order they were proposed, under the last committed token as root. Path values never grow
with depth, and ties go to the earlier candidate, so a chosen node's parent is always chosen too.
This module must not run a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from reference.attention import ancestors


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Everything proposed in one round, in the order proposed (depth by depth, beam by beam, best first).

    tokens: m ids; scores: m sums of log-probabilities along the path; parents: m candidate indices, -1 for
    the root, each smaller than its own index.
    """

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """n nodes, node 0 the root: tokens, parents (-1 root) and depths [n]; parents come before children."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]

    def positions(self, committed: int) -> tuple[int, ...]:
        """Position of each node when the root sits at `committed`: a node and its siblings share one, [n]."""
        return tuple(committed + depth for depth in self.depths)

    def lines(self) -> list[tuple[int, ...]]:
        """The tokens from the root to each node, both included."""
        found: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            found.append((token,) if parent < 0 else (*found[parent], token))
        return found

    def mask(self) -> Tensor:
        """bool [n,n]: a node sees itself and its ancestors."""
        return ancestors(self.parents)


def child_of(node: int, token: int, tokens: Sequence[int], parents: Sequence[int]) -> int | None:
    """The node behind `node` that carries `token`, None if there is none; tokens, parents [n] as a Tree has them."""
    return next((s for s in range(1, len(tokens)) if parents[s] == node and tokens[s] == token), None)


def with_depths(tokens: Sequence[int], parents: Sequence[int]) -> Tree:
    """A tree from tokens and parents [n]; ValueError unless node 0 is the only root and parents come first."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not (parent == -1 if node == 0 else 0 <= parent < node):
            raise ValueError(f"node {node} has parent {parent}; expected {'-1' if node == 0 else f'0..{node - 1}'}")
        depths.append(0 if node == 0 else depths[parent] + 1)
    return Tree(tokens=tuple(tokens), parents=tuple(parents), depths=tuple(depths))


def build_tree(root: int, candidates: Candidates, n: int) -> Tree:
    """The root token and the n-1 best candidates; ValueError if fewer were proposed."""
    if n - 1 > len(candidates.tokens):
        raise ValueError(f"a tree of {n} nodes needs {n - 1} candidates; there are {len(candidates.tokens)}")
    order = sorted(range(len(candidates.tokens)), key=lambda index: -candidates.scores[index])
    chosen = sorted(order[: n - 1])
    node_of = {-1: 0} | {index: node for node, index in enumerate(chosen, start=1)}
    return with_depths(
        (root, *(candidates.tokens[index] for index in chosen)),
        (-1, *(node_of[candidates.parents[index]] for index in chosen)),
    )


def chain_tree(root: int, proposals: Sequence[int | None]) -> Tree:
    """The last committed token and one proposal a depth, one under the other; None is no proposal."""
    tokens = [token for token in proposals if token is not None]
    return with_depths((root, *tokens), tuple(range(-1, len(tokens))))
