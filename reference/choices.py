"""The tokens that a verify, and the row after a prompt, must choose by a request's rules.

Everything that decides a token goes through `decide` or `first`, greedy or sampled, chain or tree. What the other side
did is looked at only to say which rule explains a difference. This module must not look at a trace.

Shapes: n tree nodes, V vocabulary, k steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from reference.draft import best
from reference.engine_view import Conditions
from reference.logit_rules import Rules
from reference.nearness import Near, nearest
from reference.tree import Tree
from reference.verify import Walk, greedy_walk, rejection_walk, sampled_walk

#: What penalties count at a row, given all that was generated before it.
Counts = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A walk by rules. explains: keys without which what the other side did would be right; empty where it is right."""

    walk: Walk
    explains: tuple[str, ...] = ()


def decide(
    tree: Tree,
    logits: Tensor,
    known: Conditions,
    rules: Rules,
    generated: Sequence[int],
    *,
    most: int,
    drafted: np.ndarray,
    counts: Counts = tuple,
) -> Decided:
    """The walk through what was verified, by logits [n,V]: by the other side's uniform numbers where it sampled, else
    by its choices where they are known and no rule changes them.

    generated: up to the tree's root, which is its last. most: k. drafted [k,V]: where drafts were drawn from.
    """
    if not rules.greedy and known.uniforms is None and known.committed:
        return Decided(walk=Walk(nodes=(-1,) * len(known.committed), tokens=known.committed))

    before = [(*generated, *line[1:]) for line in tree.lines()]  # what was generated before each node's own choice
    lines = [(line, counts(line)) for line in before]

    def by(rules: Rules) -> Walk:
        return _walk(tree, logits, known, rules, lines, most=most, drafted=drafted)

    def right(walk: Walk) -> bool:
        return walk.tokens[: len(known.committed)] == known.committed  # older workers cut where a request ends

    walk = by(rules)
    if not rules.keys or right(walk):
        return Decided(walk=walk)
    return Decided(walk=walk, explains=tuple(key for key in rules.keys if right(by(rules.leaving(key)))))


def _walk(
    tree: Tree,
    logits: Tensor,
    known: Conditions,
    rules: Rules,
    lines: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    most: int,
    drafted: np.ndarray,
) -> Walk:
    if rules.greedy and not rules.adjusts:
        choices = known.choices or [best(row, 1)[0] for row in logits]
        return greedy_walk(tree.tokens, tree.parents, choices)
    if rules.greedy:
        chosen = [_best_of(rules.adjusted(row, *line)) for row, line in zip(logits, lines, strict=True)]
        walk = greedy_walk(tree.tokens, tree.parents, [token for token, _ in chosen])
        return replace(walk, near=Near(margin=min(chosen[node][1] for node in walk.nodes)))
    assert known.uniforms is not None
    answers = [rules.distribution(row, *line) for row, line in zip(logits, lines, strict=True)]
    target = np.stack([probabilities for probabilities, _ in answers])
    if known.uniforms.rejection:
        walk = rejection_walk(tree.tokens, target, drafted, known.uniforms)
    else:
        walk = sampled_walk(tree.tokens, tree.parents, target, known.uniforms, most=most)
    near = nearest(walk.near, *(answers[node][1] for node in walk.nodes))
    return replace(walk, near=near.at(rules.request.temperature))


def _best_of(row: Tensor) -> tuple[int, float]:
    """The best token of a row [V], and how far it is above the next one."""
    one, other = best(row, 2)
    return one, float(row[one] - row[other])


def first(
    logits: Tensor, rules: Rules, generated: Sequence[int], taken: int | None, counted: Sequence[int] | None = None
) -> Decided:
    """The token after a prompt's last row [V]. A sampled one may be any that is left; no uniform number is known.

    taken: what the other side took, None where that is not known. counted: see Rules.adjusted.
    """

    def by(rules: Rules) -> Walk:
        if rules.greedy:
            token, margin = _best_of(rules.adjusted(logits, generated, counted))
            return Walk(nodes=(0,), tokens=(token,), near=Near(margin=margin))
        left, near = rules.distribution(logits, generated, counted)
        token = taken if taken is not None and left[taken] > 0 else int(left.argmax())
        return Walk(nodes=(0,), tokens=(token,), near=near.at(rules.request.temperature))

    walk = by(rules)
    if taken is None or walk.tokens == (taken,):
        return Decided(walk=walk)
    return Decided(walk=walk, explains=tuple(key for key in rules.keys if by(rules.leaving(key)).tokens == (taken,)))
