"""The reference session of a multi-layer MTP head: as `ReferenceSession`, but drafting is one forward a layer.

There are no draft steps: after each chunk and each verify, k layers run over the same rows, and their proposals are
the next round's chain. This module must not judge, and must see an engine's trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import torch

from harness.contract.trace import Event, RoundRecord, Trace
from harness.contract.types import Phase, RequestSpec, Scenario, SpecConfig
from reference.alone import Drafter
from reference.engine_view import EngineView, Turn
from reference.mtp import Depth, MtpHead, Window, read_depths, reads
from reference.mtp_cache import Owner, Read, Step, held_rows
from reference.session import ReferenceSession, sampled
from reference.stories import Story, is_early_chunk, known_after, stories, where_of, with_fates
from reference.tree import Tree, with_depths
from reference.turns import Conditions, Where, Writer, verified_rows, verify, walk_of
from reference.verify import Walk


class MtpSession(ReferenceSession):
    """Target and MTP layers with the speculation settings they are asked about."""

    def __init__(
        self, head: MtpHead, spec: SpecConfig, *, guesses: bool = False, refused: bool = False, shared: bool = False
    ) -> None:
        """Deviations of an engine to predict, see docs/findings.md.

        guesses: it reads guesses where a chunk ends inside a prompt (F-010). refused: rows that it runs once more read
        the states of the last verified nodes, accepted or not (F-020). shared: rows out of its prefix cache hold what
        the layers of whoever wrote them read (F-012).
        """
        if spec.algorithm != "MTP":
            raise ValueError(f"algorithm is {spec.algorithm!r}; an MTP head drafts only for 'MTP'")
        if spec.k > len(head.layers):
            raise ValueError(f"k is {spec.k}; this head has {len(head.layers)} layers, and each drafts one step")
        self.target, self.layers, self.spec = head.target, head, spec
        self.guesses, self.refused, self.shared = guesses, refused, shared
        self._held: dict[tuple[int, int, str], tuple[Read, ...]] = {}

    def replay(self, scenario: Scenario, engine: Trace) -> Trace:
        """See ReferenceSession; where rows are shared, their owners are followed first."""
        self._held = self._shared_rows(scenario, engine) if self.shared and scenario.engine.prefix_cache else {}
        try:
            return super().replay(scenario, engine)
        finally:
            self._held = {}

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
        stale = self._stale(turns, view, story.tokens) if self.refused else {}
        windows = [
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
                rounds.append((where, _chain(story.tokens[turn.start], chain), known))
            window = ran.get(id(turn))
            if window and (not view.is_last(turn) or view.has(turn, phase)):
                self.layer_rows(writer, where, phase, depths, window)
            chain, before = window.proposals if window else (), turn
        walks = self.verify_rounds(writer, story.tokens, rounds, temperature=temperature)
        return sampled([(where, known) for where, _, known in rounds], walks) if temperature > 0 else []

    def _guess(self, turn: Turn, view: EngineView, hidden: torch.Tensor) -> int | None:
        """What the target chose after a chunk inside a prompt, where that is what layers are taken to read."""
        if not self.guesses or not is_early_chunk(turn):
            return None
        chosen = view.target_choice(turn)
        return chosen[0] if chosen else int(self.target.logits(hidden[turn.start + turn.length - 1]).argmax())

    def _stale(
        self, turns: Sequence[tuple[Turn, tuple[int, ...]]], view: EngineView, tokens: list[int]
    ) -> dict[int, torch.Tensor]:
        """Start of a decode turn -> states [k-1,h] of the last nodes that the decode turn before it verified."""
        pairs = [(turn, after) for (turn, _), (after, _) in pairwise(turns) if turn.record.mode == "DECODE"]
        trees = [(turn.start, after.start, view.conditions(turn, None).tree) for turn, after in pairs]
        known = [(start, after, tree) for start, after, tree in trees if tree is not None]
        answers = verify(self.layers, torch.tensor(tokens), [(start, tree) for start, _, tree in known])
        kept = self.spec.k - 1
        return {after: hidden[len(hidden) - kept :] for (_, after, _), (hidden, _) in zip(known, answers, strict=True)}

    def depths(
        self, tokens: list[int], hidden: torch.Tensor, windows: list[Window]
    ) -> tuple[list[Depth], list[Window]]:
        if not windows:
            return [], []
        return read_depths(self.layers, torch.tensor(tokens), hidden, windows, self.spec.k)

    def prompt_rows(
        self,
        writer: Writer,
        where: Where,
        tokens: list[int],
        hidden: torch.Tensor,
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
                    g = depth.g[row]
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
        return _LayersAlone(self, request, writer)


class _LayersAlone:
    """One request speculating with layers that draft a token each; rows are written once all windows are known."""

    drafts = 0

    def __init__(self, session: MtpSession, request: RequestSpec, writer: Writer) -> None:
        self._session, self._writer, self._request = session, writer, request
        self.layers, self._windows = session.spec.k, list[Window]()
        self.tokens, self._prompt = list(request.prompt), len(request.prompt)
        self.tokens.append(int(self._logits(self._forward()[-1]).argmax()))
        self._hidden = self._forward()

    def _forward(self) -> torch.Tensor:
        return self._session.target.forward(torch.tensor(self.tokens))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._session.target.logits(hidden)

    def chunk(self, where: Where, length: int, *, final: bool) -> None:
        start, stop = where.committed, where.committed + length
        self._session.prompt_rows(self._writer, where, self.tokens, self._hidden, length)
        guess = None if final or not self._session.guesses else int(self._logits(self._hidden[stop - 1]).argmax())
        self._windows.append(Window(start=start, stop=stop, known=self._prompt + final, guess=guess))

    def decode(self, where: Where) -> int:
        session, c = self._session, where.committed
        self._windows = session.depths(self.tokens, self._hidden, self._windows)[1]
        chain = _chain(self.tokens[c], self._windows[-1].proposals)
        (walk,) = session.verify_rounds(self._writer, self.tokens, [(where, chain, Conditions())])
        self.tokens += walk.tokens
        self._hidden = self._forward()
        stop = c + len(walk.tokens)
        self._windows.append(Window(start=c, stop=stop, known=stop + 1))
        return len(walk.tokens)

    def close(self, records: list[RoundRecord]) -> None:
        depths, windows = self._session.depths(self.tokens, self._hidden, self._windows)
        for record, window in zip(records, windows, strict=True):
            phase = Phase.DRAFT_PREFILL if record.mode == "PREFILL" else Phase.EXTEND
            where = where_of(record, rid=self._request.rid, epoch=0, committed=window.start)
            self._session.layer_rows(self._writer, where, phase, depths, window)


def _window(turn: Turn, committed: tuple[int, ...], **known: Any) -> Window:
    """The rows a turn ran the layers over; known: what else a Window holds, such as how much text there was then."""
    length = turn.length if turn.record.mode == "PREFILL" else len(committed)
    return Window(start=turn.start, stop=turn.start + length, **known)


def _chain(root: int, proposals: Sequence[int | None]) -> Tree:
    """The last committed token and the layers' proposals, one under the other."""
    tokens = [token for token in proposals if token is not None]
    return with_depths((root, *tokens), tuple(range(-1, len(tokens))))
