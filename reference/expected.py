"""What the reference's own proposals would have been accepted for, beside what was really proposed.

Whoever drafts, greedy text is the same (arXiv 2211.17192), so a round's own tree is walked along the text that follows
its committed tokens, and needs no verify. Where that text ends first, it is continued. This module must not look at a
trace, or decide which rounds happen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from harness.contract.batches import event_at
from harness.contract.trace import Event
from reference.draft import best
from reference.logit_rules import Rules
from reference.rounds import Drafts
from reference.tree import Tree, child_of


def expected_accepts(drafts: Drafts, rules: Rules) -> list[Event]:
    """Event('expected_accept') for each decode round of a greedy request: the tokens it would have committed."""
    parts = [part for part, _ in drafts.timeline.parts if part.record.mode == "DECODE" and drafts.knows(part)]
    text = _Text(drafts, rules)
    return [
        event_at(part, "expected_accept", tokens=committed_by(tree, text.behind(part.start + 1)))
        for part, tree in zip(parts, drafts.own_trees(parts), strict=True)
    ]


def committed_by(tree: Tree, text: Iterator[int]) -> int:
    """How many tokens of `text`, which follows its root, a tree would commit: the accepted nodes and one more."""
    node, length = 0, 1
    for token in text:
        child = child_of(node, token, tree.tokens, tree.parents)
        if child is None:
            break
        node, length = child, length + 1
    return length


class _Text:
    """A request's tokens, and behind them what greedy decoding goes on with."""

    def __init__(self, drafts: Drafts, rules: Rules) -> None:
        self._rules, self._prompt = rules, len(rules.request.input_ids)
        self._target, self._tokens = drafts.head.target, list(drafts.timeline.tokens)
        self._trunk, self._last = drafts.trunk, drafts.final[-1]

    def behind(self, at: int) -> Iterator[int]:
        """The tokens from `at` on, without end."""
        for place in itertools.count(at):
            if place == len(self._tokens):
                self._go_on()
            yield self._tokens[place]

    def _go_on(self) -> None:
        """One token more; its own row is read when the next one is wanted."""
        if len(self._tokens) > self._trunk.rows:
            last = self._target.layers
            self._trunk = self._target.read(self._tokens[-1:], keep=(last,), after=self._trunk)
            self._last = self._trunk.states[last][-1]
        logits = self._rules.adjusted(self._target.logits(self._last), self._tokens[self._prompt :])
        self._tokens.append(best(logits, 1)[0])
