"""The reference session of a multi-layer MTP head: as `ReferenceSession`, but drafting is one forward a layer.

There are no draft steps: after each chunk and each verify, k layers run over the same rows, and their proposals are
the next round's chain. This module must not judge, and must see an engine's trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from harness.contract.trace import Event, Trace
from harness.contract.types import Phase, RequestSpec, Scenario, SpecConfig
from reference.alone import Drafter
from reference.engine_view import EngineView, Turn
from reference.mtp import Depth, MtpHead, Window, as_held, read_depths, reads
from reference.mtp_alone import LayersAlone
from reference.mtp_cache import Owner, Read, Step, held_rows
from reference.mtp_narrow import Run, Share, block_of, said_in_graphs
from reference.mtp_pool import pooled, verified_states
from reference.session import ReferenceSession, sampled
from reference.stories import Story, is_early_chunk, known_after, stories, where_of, with_fates
from reference.tree import Tree, chain_tree
from reference.turns import Conditions, verified_rows, verify, walk_of
from reference.verify import Walk
from reference.writer import Where, Writer


class MtpSession(ReferenceSession):
    """Target and MTP layers with the speculation settings they are asked about."""

    def __init__(
        self,
        head: MtpHead,
        spec: SpecConfig,
        *,
        guesses: bool = False,
        refused: bool = False,
        shared: bool = False,
        narrow: bool = False,
    ) -> None:
        """Known issues of an engine to predict, see docs/findings.

        guesses: it reads guesses where a chunk ends inside a prompt (F-010). refused: rows that it runs once more read
        the states of the last verified nodes, accepted or not (F-020). shared: rows out of its prefix cache hold what
        the layers of whoever wrote them read (F-012). narrow: in graphs, attention takes the rows of every layer for
        blocks as wide as the first one's (F-027).
        """
        if spec.algorithm != "MTP":
            raise ValueError(f"algorithm is {spec.algorithm!r}; an MTP head drafts only for 'MTP'")
        if spec.k > len(head.layers):
            raise ValueError(f"k is {spec.k}; this head has {len(head.layers)} layers, and each drafts one step")
        self.target, self.layers, self.spec = head.target, head, spec
        self.guesses, self.refused, self.shared, self.narrow = guesses, refused, shared, narrow
        self._said: dict[Share, Tensor | None] = {}
        self._held: dict[tuple[int, int, str], tuple[Read, ...]] = {}

    def replay(self, scenario: Scenario, engine: Trace) -> Trace:
        """See ReferenceSession; where rows are shared, their owners are followed first, and so are batches."""
        self._held = self._shared_rows(scenario, engine) if self.shared and scenario.engine.prefix_cache else {}
        try:
            self._said = self._in_batches(scenario, engine) if self.narrow else {}
            return super().replay(scenario, engine)
        finally:
            self._held, self._said = {}, {}

    @torch.inference_mode()
    def _in_batches(self, scenario: Scenario, engine: Trace) -> dict[Share, Tensor | None]:
        """What the last row of each request says where its draft extend ran in a graph; None is not known."""
        view = EngineView(engine, self.spec, self.target.config.vocab)
        told = [story for request in scenario.requests for story in stories(request, view)]
        return said_in_graphs(self.layers, self.spec, [run for story in told for run in self._runs(story, view)])

    def _runs(self, story: Story, view: EngineView) -> Iterator[Run]:
        """The rows of each decode turn's draft extend by layer, refused nodes included."""
        hidden = self.target.forward(torch.tensor(story.tokens))
        turns = [(turn, committed) for turn, committed in story.turns if committed or is_early_chunk(turn)]
        verified = verified_states(self.layers, story.tokens, turns, view)
        windows = self.depths(story.tokens, hidden, self._windows(story, turns, view, hidden))[1]
        for layer in range(1, self.spec.k if windows else 1):
            helds = as_held(story.tokens, hidden[: windows[-1].stop], windows, layer)
            for (turn, _), held, window in zip(turns, helds, windows, strict=True):
                if turn.start in verified and turn.record.mode == "DECODE" and window.again:
                    yield turn, layer, block_of(held, window, verified[turn.start], layer)

    def _shared_rows(self, scenario: Scenario, engine: Trace) -> dict[tuple[int, int, str], tuple[Read, ...]]:
        """(DP rank, round, rid) -> what the rows before that turn's window hold (see reference.mtp_cache)."""
        view = EngineView(engine, self.spec, self.target.config.vocab)
        steps = [
            (turn, step)
            for request in scenario.requests
            for story, stays in with_fates(stories(request, view))
            for turn, step in self._steps(story, view, stays=stays)
        ]
        steps.sort(key=lambda one: (one[0].record.dp_rank, one[0].record.index, one[0].record.rids.index(one[0].rid)))
        found: dict[tuple[int, int, str], tuple[Read, ...]] = {}
        for _, own in groupby(steps, key=lambda one: one[0].record.dp_rank):
            listed = list(own)
            for (turn, _), held in zip(listed, held_rows(step for _, step in listed), strict=True):
                found[turn.record.dp_rank, turn.record.index, turn.rid] = held
        return found

    def _steps(self, story: Story, view: EngineView, *, stays: bool) -> Iterator[tuple[Turn, Step]]:
        """The windows of one story and what their layers read, as far as the engine told what they proposed."""
        turns = [(turn, committed) for turn, committed in story.turns if committed or is_early_chunk(turn)]
        prompts = [turn.start + turn.length for turn, _ in turns if turn.record.mode == "PREFILL"]
        owner = Owner(text=story.tokens, asked=max(prompts, default=0), stays=stays)
        for number, ((turn, committed), known) in enumerate(zip(turns, known_after(story), strict=True)):
            proposals = view.layer_proposals(turn)
            told = view.target_choice(turn) if self.guesses and is_early_chunk(turn) else ()
            window = _window(turn, committed, known=known, proposals=proposals, guess=told[0] if told else None)
            yield (
                turn,
                Step(
                    owner=owner,
                    round=turn.record.index,
                    window=window,
                    read=reads(story.tokens, window, self.spec.k)
                    if None not in proposals
                    else [()] * (window.stop - window.start),
                    prompt=turn.record.mode == "PREFILL",
                    final=turn.final,
                    first=not number,
                    last=number == len(turns) - 1,
                ),
            )

    def _replay(
        self, story: Story, view: EngineView, writer: Writer, *, temperature: float, heat: float = 0.0
    ) -> list[Event]:
        if heat:
            raise ValueError("layers that draw what they propose are not built here; leave engine.rejection out")
        hidden = self.target.forward(torch.tensor(story.tokens))
        turns = [(turn, committed) for turn, committed in story.turns if committed or is_early_chunk(turn)]
        windows = self._windows(story, turns, view, hidden)
        depths, filled = self.depths(story.tokens, hidden, windows)
        rounds, chain = list[tuple[Where, Tree, Conditions]](), tuple[int | None, ...]()
        before: Turn | None = None
        ran = {id(turn): window for (turn, _), window in zip(turns, filled, strict=True)}
        for turn, committed in story.turns:
            where = where_of(turn.record, rid=turn.rid, epoch=turn.epoch, committed=turn.start)
            phase = Phase.EXTEND
            if turn.record.mode == "PREBUILT":  # the chain of the prompt's last row came along
                self._handed_rows(writer, where, story.tokens, depths, chain)
                before = turn
                continue
            if turn.record.mode == "PREFILL":
                chosen = view.target_choice(turn) if temperature > 0 else ()
                self.prompt_rows(writer, where, story.tokens, hidden, turn.length, chosen=chosen)
                phase = Phase.DRAFT_PREFILL
            elif len(chain) == self.spec.k:
                known = view.conditions(turn, before)
                known = replace(known, committed=committed) if temperature > 0 else known
                rounds.append((where, chain_tree(story.tokens[turn.start], chain), known))
            window = ran.get(id(turn))
            if window and (not view.is_last(turn) or view.has(turn, phase)):
                self.layer_rows(writer, where, phase, depths, window)
            chain, before = window.proposals if window else (), turn
        walks = self.verify_rounds(writer, story.tokens, rounds, temperature=temperature)
        return sampled([(where, known) for where, _, known in rounds], walks) if temperature > 0 else []

    def _windows(
        self, story: Story, turns: Sequence[tuple[Turn, tuple[int, ...]]], view: EngineView, hidden: Tensor
    ) -> list[Window]:
        """What the layers ran over in each turn, as far as the engine told it."""
        stale = dict[int, Tensor]()
        if self.refused:
            stale = pooled(verified_states(self.layers, story.tokens, turns, view), turns, hidden, self.spec.k - 1)
        return [
            _window(
                turn,
                committed,
                known=known,
                proposals=view.layer_proposals(turn),
                guess=self._guess(turn, view, hidden),
                again=view.ran_again(turn),
                stale=stale.get(turn.start),
                held=self._held.get((turn.record.dp_rank, turn.record.index, turn.rid), ()),
            )
            for (turn, committed), known in zip(turns, known_after(story), strict=True)
        ]

    def _guess(self, turn: Turn, view: EngineView, hidden: Tensor) -> int | None:
        """What the target chose after a chunk inside a prompt, where that is what layers are taken to read."""
        if not self.guesses or not is_early_chunk(turn):
            return None
        chosen = view.target_choice(turn)
        return chosen[0] if chosen else int(self.target.logits(hidden[turn.start + turn.length - 1]).argmax())

    def depths(self, tokens: list[int], hidden: Tensor, windows: list[Window]) -> tuple[list[Depth], list[Window]]:
        if not windows:
            return [], []
        return read_depths(self.layers, torch.tensor(tokens), hidden, windows, self.spec.k)

    def prompt_rows(
        self,
        writer: Writer,
        where: Where,
        tokens: list[int],
        hidden: Tensor,
        length: int,
        *,
        chosen: Sequence[int] = (),
    ) -> None:
        """Target rows of one chunk; the last one also says what comes next. chosen: what was drawn there, if it was."""
        for j, row in enumerate(range(where.committed, where.committed + length)):
            values: dict[str, Any] = {}
            if j == length - 1:
                values = {"logits": self.target.logits(hidden[row]), "choose": 1, "drawn": chosen}
            writer.add(where, Phase.PREFILL, j, input_id=tokens[row], position=row, hidden_out=hidden[row], **values)

    def _handed_rows(
        self,
        writer: Writer,
        where: Where,
        tokens: list[int],
        depths: Sequence[Depth],
        chain: Sequence[int | None],
    ) -> None:
        """What a decode side must hold: a row a layer and position, token full[slot + 1]; the last one proposes.

        Nothing of a request whose prompt's chain is not known, as of one that was taken back.
        """
        for i, depth in enumerate(depths if len(chain) == self.spec.k else ()):
            for row in range(where.committed):
                values: dict[str, Any] = {}
                if row == where.committed - 1:
                    logits = self.layers.layers[i].logits(depth.g[row])
                    values = {"logits": logits, "choose": 1, "scored": True}
                writer.add(where, Phase.PREBUILT, row, step=i, input_id=tokens[row + 1], **values)

    def layer_rows(self, writer: Writer, where: Where, phase: Phase, depths: Sequence[Depth], window: Window) -> None:
        """Rows of every layer, keyed by it as the step; the last row of each proposes."""
        for i, depth in enumerate(depths):
            for j, row in enumerate(range(window.start, window.stop)):
                values: dict[str, Any] = {}
                if row == window.stop - 1:
                    g = self._said.get((where.dp_rank, where.round, where.rid, i), depth.g[row])
                    if g is not None and bool(g.isfinite().all()):  # else nothing of this row can be foretold
                        logits = self.layers.layers[i].logits(g)
                        values = {"hidden_out": g, "logits": logits, "choose": 1, "scored": True}
                token, hidden = int(depth.tokens[row]), depth.hidden[row]
                writer.add(where, phase, j, step=i, input_id=token, position=row, hidden_in=hidden, **values)

    def verify_rounds(
        self,
        writer: Writer,
        tokens: list[int],
        rounds: Sequence[tuple[Where, Tree, Conditions]],
        *,
        temperature: float = 0.0,
    ) -> list[Walk]:
        """VERIFY and ACCEPT rows of all rounds, each answering the chain that was really verified; their walks."""
        trees = [conditions.tree or expected for _, expected, conditions in rounds]
        starts = [where.committed for where, _, _ in rounds]
        answers = verify(self.layers, torch.tensor(tokens), list(zip(starts, trees, strict=True)))
        walks = []
        for (where, expected, conditions), tree, (hidden, logits) in zip(rounds, trees, answers, strict=True):
            walk = walk_of(tree, logits, conditions, most=self.spec.k, temperature=temperature)
            verified_rows(writer, where, expected, walk, hidden, logits)
            walks.append(walk)
        return walks

    def _drafter(
        self, request: RequestSpec, writer: Writer, events: list[Event], uniform: Callable[[], float] | None
    ) -> Drafter:
        if uniform is not None:
            raise ValueError("MTP layers speculate freely at temperature 0 only; leave uniform out")
        return LayersAlone(self, request, writer)


def _window(turn: Turn, committed: tuple[int, ...], **known: Any) -> Window:
    """The rows a turn ran the layers over; known: what else a Window holds, such as how much text there was then."""
    length = turn.length if turn.record.mode == "PREFILL" else len(committed)
    return Window(start=turn.start, stop=turn.start + length, **known)
