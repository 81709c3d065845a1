"""Rows of one request drafted by an EAGLE head: the expected input and output of each draft forward.

Everything follows from `Reading` (both models over one token sequence) and, when conditioned, from what the other side
proposed. This module must not look at a trace but through `EngineView`, or decide which rounds happen.

Symbols: c committed length, k steps, t topk, n tree nodes, h hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harness.contract.batches import Part
from harness.contract.settings import SpecConfig
from harness.contract.types import Phase
from reference.departures import Departure
from reference.draft import Attends, Chain, Forced, Proposals, Reading, ancestors_only, draft, rotate
from reference.engine_view import Conditions, EngineView
from reference.logit_rules import distribution
from reference.model import Head
from reference.rows import Writer
from reference.timeline import RequestTimeline
from reference.tree import Tree, build_tree


class HeadDrafts:
    """temperature: at which drafts were drawn; None where they are the head's best."""

    def __init__(
        self,
        head: Head,
        spec: SpecConfig,
        timeline: RequestTimeline,
        view: EngineView,
        *,
        departures: Sequence[Departure] = (),
        temperature: float | None = None,
    ) -> None:
        self.head, self.spec, self.view, self.temperature = head, spec, view, temperature
        self._departures = departures
        self._own: dict[int, Tree] = {}  # by committed length: what nobody had to force
        self.timeline, self.reading = timeline, Reading.of(head, timeline.tokens)
        self.trunk, self.hidden, self.final = self.reading.trunk, self.reading.hidden, self.reading.final

    def knows(self, part: Part) -> bool:
        """Whether the proposals of a decode round are known: always."""
        return True

    def handed_rows(self, writer: Writer, part: Part) -> None:
        """What a decode side must hold after a hand-over at c committed tokens: a row a position, token full[slot + 1].

        The last row carries the draft's own state there and its t best proposals, as if the prompt had been read here.
        """
        c, reading = part.start, self.reading
        g = reading.draft[c - 1 : c]
        writer.add(
            part,
            Phase.PREBUILT,
            input_id=self.timeline.tokens[1 : c + 1],
            hidden_out=g,
            logits=self.head.logits(g),
            **self._proposals(part),
        )

    def proposal_rows(self, writer: Writer, part: Part, phase: Phase, length: int) -> None:
        """Draft rows c .. c+length-1, for a prompt chunk (DRAFT_PREFILL) or committed tokens (EXTEND).

        The last row makes the first proposals of the next decode round: its best, or what was drawn. Rows whose token
        is not known are left out.
        """
        c, reading = part.start, self.reading
        if not length:
            return
        stop = min(c + length, len(self.timeline.tokens) - 1)
        g = reading.draft[stop - 1 : stop] if stop == c + length else None
        writer.add(
            part,
            phase,
            input_id=rotate(self.timeline.tokens, c, stop),
            position=range(c, stop),
            hidden_in=reading.hidden[c:stop],
            hidden_out=g,
            logits=None if g is None else self.head.logits(g),
            **self._proposals(part),
        )

    def _proposals(self, part: Part) -> dict[str, Any]:
        """How the next round's first proposals are chosen: the best, or those that were drawn."""
        drawn = self.view.proposed(part) if self.temperature else ()
        chosen = {"choose": self.spec.eagle_topk, "scored": True, "drawn": [drawn] if drawn else ()}
        return chosen | {"temperature": self.temperature or 1.0}

    def trees(self, writer: Writer, rounds: Sequence[tuple[Part, Conditions]]) -> list[tuple[Tree, np.ndarray]]:
        """DRAFT rows of decode rounds; the tree of each, and the distributions that its tokens were drawn from.

        Distributions [k,V] are empty where drafts are not drawn.
        """
        own = all(departure.sees_round() for departure in self._departures)
        chains = self._chains([(part, conditions.forced) for part, conditions in rounds], self._attends, own=own)
        found = []
        for (part, conditions), chain in zip(rounds, chains, strict=True):
            self._draft_rows(writer, part, chain, conditions.forced.chosen if self.temperature else {})
            tree = self._tree(part, chain)
            found.append((tree, self._drafted(part.start, chain)))
            self._own |= {part.start: tree} if chain.own else {}
        return found

    def own_trees(self, parts: Sequence[Part]) -> list[Tree]:
        """The tree of each of these decode rounds where nobody else proposes anything."""
        left = [part for part in parts if part.start not in self._own]
        chains = self._chains([(part, Forced()) for part in left])
        self._own |= {part.start: self._tree(part, chain) for part, chain in zip(left, chains, strict=True)}
        return [self._own[part.start] for part in parts]

    def _chains(
        self, rounds: Sequence[tuple[Part, Forced]], attends: Attends = ancestors_only, *, own: bool = True
    ) -> list[Chain]:
        """What each round drafts, in their order; those of one number of steps together."""
        steps = [part.spec(self.spec).num_steps for part, _ in rounds]
        found: dict[int, Chain] = {}
        for k in sorted(set(steps)):
            places = [place for place, one in enumerate(steps) if one == k]
            forced = [(rounds[place][0].start, rounds[place][1]) for place in places]
            chains = draft(self.head, self.reading, forced, k=k, t=self.spec.eagle_topk, attends=attends, own=own)
            found |= dict(zip(places, chains, strict=True))
        return [found[place] for place in range(len(rounds))]

    def _tree(self, part: Part, chain: Chain) -> Tree:
        nodes = part.spec(self.spec).num_draft_tokens
        return build_tree(self.timeline.tokens[part.start], chain.candidates, nodes)

    def _attends(self, step: int, parents: Sequence[int]) -> Sequence[int]:
        for departure in self._departures:
            parents = departure.attends(step, parents)
        return parents

    def _drafted(self, c: int, chain: Chain) -> np.ndarray:
        """The distribution [k,V] that each drafted token was drawn from: the row before the round, then each step.

        A hand-over carries a token and not its distribution: there it stands as one that nobody drew.
        """
        if not self.temperature:
            return np.empty((0, 0))
        last = self.head.logits(self.reading.draft[c - 1])
        logits = torch.stack([last, *(step.logits[0] for step in chain.steps)])
        found = distribution(logits, self.temperature)
        if c in self.timeline.handed:
            found[0] = np.eye(1, found.shape[1], chain.candidates.tokens[0])
        return found

    def _draft_rows(self, writer: Writer, part: Part, chain: Chain, drawn: Mapping[int, Proposals]) -> None:
        for i, step in enumerate(chain.steps):
            writer.add(
                part,
                Phase.DRAFT,
                step=i,
                input_id=step.expected_ids,
                position=[part.start + i] * self.spec.eagle_topk,
                parent=step.expected_parents,
                attends=step.attended,
                hidden_in=step.hidden_in,
                hidden_out=step.hidden_out,
                logits=step.logits,
                choose=self.spec.eagle_topk,
                scored=True,
                drawn=drawn.get(i, ()),
                temperature=self.temperature or 1.0,
            )
