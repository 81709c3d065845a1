"""Rows of one request drafted by multi-token prediction layers: one forward a layer instead of draft steps.

After each chunk and each verify, k layers run over the same rows, and their proposals are the next round's chain. This
module must not look at a trace but through `EngineView`, or decide which rounds happen.

Symbols: c committed length, k layers, T tokens, h hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.contract.batches import Part
from harness.contract.settings import SpecConfig
from harness.contract.types import Phase
from reference.departures import Departure
from reference.engine_view import Conditions, EngineView
from reference.logit_rules import distribution
from reference.model import Trunk
from reference.mtp import MtpHead
from reference.rows import Writer
from reference.timeline import RequestTimeline, is_early_chunk
from reference.tree import Tree, chain_tree
from reference.windows import Depth, Reads, Window, read_depths


class LayerDrafts:
    """One request; see reference.departures.Followed. temperature: at which drafts were drawn, None where they are the
    layers' best."""

    def __init__(
        self,
        head: MtpHead,
        spec: SpecConfig,
        timeline: RequestTimeline,
        view: EngineView,
        *,
        departures: Sequence[Departure] = (),
        temperature: float | None = None,
    ) -> None:
        self.head, self.spec, self.timeline, self.view, self.temperature = head, spec, timeline, view, temperature
        self._departures = departures
        self.ran = _windows(timeline, view)

    @cached_property
    def trunk(self) -> Trunk:
        """The target over the request's tokens."""
        return self.head.target.read(self.timeline.tokens, keep=self.head.states)

    @property
    def hidden(self) -> Tensor:
        """The target's states [T,h]: handed over, and what its logits come from."""
        return self.head.features(self.trunk.states)

    @property
    def final(self) -> Tensor:
        return self.hidden

    @cached_property
    def reads(self) -> Reads:
        reads = Reads()
        for departure in self._departures:
            reads = departure.reads(reads, self)
        return reads

    @cached_property
    def _depths(self) -> tuple[list[Depth], list[Window]]:
        windows = [window for _, window in self.ran]
        return read_depths(self.head, self.timeline.tokens, self.hidden, windows, self.spec.num_steps, self.reads)

    @property
    def filled(self) -> list[Window]:
        return self._depths[1]

    def chain(self, c: int) -> tuple[int | None, ...]:
        """What the layers proposed behind c committed tokens; () if they did not run there."""
        return next((window.proposals for window in self.filled if window.stop == c), ())

    def knows(self, part: Part) -> bool:
        """Whether the proposals of a decode round are known."""
        return len(self.chain(part.start)) == self.spec.num_steps

    def handed_rows(self, writer: Writer, part: Part) -> None:
        """What a decode side must hold: a row a layer and position, token full[slot + 1]; the last one proposes.

        Nothing of a request whose prompt's chain is not known, as of one that was taken back.
        """
        c, tokens = part.start, self.timeline.tokens
        for i, depth in enumerate(self._depths[0] if self.knows(part) else ()):
            writer.add(
                part,
                Phase.PREBUILT,
                step=i,
                input_id=tokens[1 : c + 1],
                logits=self.head.layers[i].logits(depth.g[c - 1 : c]),
                scored=True,
                **self._drawn(c, i),
            )

    def proposal_rows(self, writer: Writer, part: Part, phase: Phase, length: int) -> None:
        """Rows of every layer, keyed by it as the step; the last row of each proposes. None where they did not run."""
        start, stop = part.start, part.start + length
        ran = any(own is part for own, _ in self.ran)
        for i, depth in enumerate(self._depths[0] if ran else ()):
            g: Tensor | None = depth.g[stop - 1]
            for departure in self._departures:
                g = None if g is None else departure.says(part, i, g)
            writer.add(
                part,
                phase,
                step=i,
                input_id=depth.tokens[start:stop],
                position=range(start, stop),
                hidden_in=depth.hidden[start:stop],
                hidden_out=None if g is None else g[None],
                logits=None if g is None else self.head.layers[i].logits(g[None]),
                scored=True,
                **self._drawn(stop, i),
            )

    def trees(self, writer: Writer, rounds: Sequence[tuple[Part, Conditions]]) -> list[tuple[Tree, np.ndarray]]:
        """The chain of each decode round, and the distributions [k,V] that it was drawn from, empty where it was not.

        There are no DRAFT rows.
        """
        tokens = self.timeline.tokens
        return [
            (chain_tree(tokens[part.start], self.chain(part.start)), self._drafted(part.start)) for part, _ in rounds
        ]

    def _drawn(self, c: int, layer: int) -> dict[str, Any]:
        """What a layer's row behind c tokens says of its choice, where that was drawn."""
        token = self.chain(c)[layer : layer + 1] if self.temperature else ()
        return {"drawn": [token], "temperature": self.temperature} if token and token[0] is not None else {}

    def _drafted(self, c: int) -> np.ndarray:
        """See HeadDrafts; a hand-over carries the whole chain."""
        if not self.temperature:
            return np.empty((0, 0))
        layers = list(zip(self.head.layers, self._depths[0], strict=False))
        if c in self.timeline.handed:
            return np.eye(self.head.target.vocab)[[token or 0 for token in self.chain(c)]]
        return distribution(torch.stack([layer.logits(depth.g[c - 1]) for layer, depth in layers]), self.temperature)

    @cached_property
    def _own(self) -> dict[int, Tree]:
        """By committed length, the chain that the layers propose where nobody else has proposed anything."""
        windows, tokens = [replace(window, proposals=()) for _, window in self.ran], self.timeline.tokens
        _, filled = read_depths(self.head, tokens, self.hidden, windows, self.spec.num_steps)
        return {w.stop: chain_tree(tokens[w.stop], w.proposals) for w in filled if w.stop < len(tokens)}

    def own_trees(self, parts: Sequence[Part]) -> list[Tree]:
        """The tree of each of these decode rounds where nobody else proposes anything."""
        return [self._own[part.start] for part in parts]


def _windows(timeline: RequestTimeline, view: EngineView) -> list[tuple[Part, Window]]:
    """The parts in which the layers ran, and over which rows, as far as the engine reported it."""
    length, found = len(timeline.tokens), list[tuple[Part, Window]]()
    for part, committed in reversed(timeline.parts):
        if committed or is_early_chunk(part):
            rows = part.length if part.record.mode == "PREFILL" else len(committed)
            window = Window(
                start=part.start,
                stop=part.start + rows,
                known=length,
                proposals=view.layer_proposals(part),
                again=view.ran_again(part),
            )
            found.append((part, window))
        length -= len(committed)
    return found[::-1]
