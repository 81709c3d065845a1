"""Texts by number, what the rows of a target and a draft are functions of, and the trees that grow from a text.

Two rows with the same `Meaning` must hold the same values, whatever batch, cache, chunk or slot they were computed in.
Trees grow by EAGLE-2's selection (see `reference.draft` and `reference.tree`) with the scores that an engine recorded
instead of logits; where two selections are as good within rounding, the one that was made counts. This module must not
know a trace.

Symbols: t beams, n tree nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from harness.contract.tolerance import BUDGETS
from reference.tree import Candidates, Tree, build_tree

#: The number of the empty text.
NOTHING = 0


class Meaning(NamedTuple):
    """A row that read the last token of a text, all before it known. text: its number among `Texts`.

    target: the target's row at that token. draft: the draft's row that reads that token beside the target's state one
    before it; the last `drafted` tokens were proposals that draft steps fed, each beside the state that the step before
    left (0: the row that catches up with the target).
    """

    model: Literal["target", "draft"]
    text: int
    drafted: int = 0


class Texts:
    """Token sequences by number: the same sequence has the same number, however it was reached."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._ends: list[tuple[int, int]] = [(NOTHING, -1)]  # number -> (text without its last token, that token)

    def after(self, text: int, token: int) -> int:
        """The text with one more token."""
        number = self._numbers.setdefault((text, token), len(self._ends))
        if number == len(self._ends):
            self._ends.append((text, token))
        return number

    def along(self, tokens: Sequence[int]) -> list[int]:
        """The empty text, and the text behind each of n tokens, [n + 1]."""
        found = [NOTHING]
        for token in tokens:
            found.append(self.after(found[-1], token))
        return found

    def without(self, text: int, count: int = 1) -> int:
        """The text without its last tokens."""
        for _ in range(count):
            text = self._ends[text][0]
        return text

    def tokens(self, text: int) -> tuple[int, ...]:
        """The tokens of a text."""
        found = []
        while text != NOTHING:
            text, token = self._ends[text]
            found.append(token)
        return tuple(reversed(found))


#: Path values that differ by less than this many roundings are the same.
ROUNDINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A token to feed. parent: the beam of the step before it grew from, -1 at step 0; node: its candidate.

    before, text: the numbers of the texts without and with it.
    """

    token: int
    parent: int
    node: int
    before: int
    text: int


class Growth:
    """One round. text: the number of the committed text, its last token included."""

    def __init__(self, texts: Texts, *, text: int, t: int, dtype: str) -> None:
        self._texts, self._root, self._t = texts, text, t
        self._width = ROUNDINGS * BUDGETS[dtype].rounding
        self._tokens, self._values, self._parents = list[int](), list[float](), list[int]()
        self._level: list[Beam] = []  # the newest candidates
        self._whole = True  # whether every proposal and every score so far is known

    def begin(self, proposals: Sequence[int], scores: Sequence[float]) -> None:
        """The t first proposals."""
        root = Beam(token=-1, parent=-1, node=-1, before=self._root, text=self._root)
        self._grow([root], [proposals], {0: tuple(scores)}, first=True)

    def propose(
        self, fed: Sequence[Beam], chosen: Sequence[Sequence[int]], scores: Mapping[int, tuple[float, ...]]
    ) -> None:
        """What each beam that was fed proposed."""
        self._grow(fed, chosen, scores, first=False)

    def _grow(
        self,
        beams: Sequence[Beam],
        chosen: Sequence[Sequence[int]],
        scores: Mapping[int, tuple[float, ...]],
        *,
        first: bool,
    ) -> None:
        self._level = []
        self._whole = self._whole and len(chosen) == len(beams) > 0
        for slot, (beam, proposals) in enumerate(zip(beams, chosen, strict=False)):
            own = scores.get(slot, ())
            self._whole = self._whole and bool(proposals) and (self._t == 1 or len(own) == len(proposals))
            before = self._values[beam.node] if beam.node >= 0 else 0.0
            for rank, token in enumerate(proposals):
                gain = math.log(own[rank]) if self._t > 1 and rank < len(own) and own[rank] > 0 else 0.0
                text = self._texts.after(beam.text, token)
                parent = -1 if first else slot
                node = len(self._tokens)
                self._level.append(Beam(token=token, parent=parent, node=node, before=beam.text, text=text))
                self._tokens.append(token)
                self._values.append(before + gain)
                self._parents.append(beam.node)

    def feed(self, input_ids: Sequence[int], parents: Sequence[int]) -> tuple[Sequence[Beam], Sequence[Beam]]:
        """(beams expected, beams fed) of the next step, t each; input_ids, parents: what was fed, where that is known.

        What was fed is expected too where the selection is not known, or is as good as the best.
        """
        best = sorted(self._level, key=lambda beam: -self._values[beam.node])[: self._t]
        if not input_ids:
            return best, best
        known = len(best) == len(input_ids)
        fed, strange = self._located(input_ids, parents, best), False
        for beam, wanted in zip(fed, best, strict=False):
            strange = strange or beam.node < 0 or self._gap(beam, wanted) > self._width
        return (best if known and self._whole and strange else fed), fed

    def _located(self, input_ids: Sequence[int], parents: Sequence[int], best: Sequence[Beam]) -> list[Beam]:
        """What was fed, among the newest candidates; one that nobody proposed stands behind the beam expected there."""
        free = sorted(self._level, key=lambda beam: -self._values[beam.node])
        found = []
        for slot, token in enumerate(input_ids):
            parent = parents[slot] if slot < len(parents) else -1
            fits = [beam for beam in free if beam.token == token and parent in (-1, beam.parent)]
            if fits:
                free.remove(fits[0])
                found.append(fits[0])
                continue
            before = best[slot].before if slot < len(best) else self._root
            text = self._texts.after(before, token)
            found.append(Beam(token=token, parent=parent, node=-1, before=before, text=text))
        return found

    def _gap(self, one: Beam, other: Beam) -> float:
        return abs(self._values[one.node] - self._values[other.node])

    def tree(self, root: int, n: int, verified: Tree | None) -> Tree | None:
        """The tree of n nodes to verify; the one that was, where the selection is not known or is as good."""
        if not self._whole or n - 1 > len(self._tokens):
            return verified
        candidates = Candidates(tokens=tuple(self._tokens), scores=tuple(self._values), parents=tuple(self._parents))
        best = build_tree(root, candidates, n)
        return verified if verified is not None and self._as_good(verified, n) else best

    def _as_good(self, tree: Tree, n: int) -> bool:
        """Whether the best candidate left out is no better than the worst one taken, but for rounding."""
        places = dict[tuple[int, int], int]()
        for node, place in enumerate(zip(self._parents, self._tokens, strict=True)):
            places.setdefault(place, node)
        taken = [-1]
        for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
            found = places.get((taken[parent], token))
            if found is None:
                return False
            taken.append(found)
        if len(taken) != n or taken != sorted(set(taken)):
            return False
        left = [value for node, value in enumerate(self._values) if node not in set(taken)]
        worst = min(self._values[node] for node in taken[1:])
        return max(left, default=-math.inf) - worst <= self._width
