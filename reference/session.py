"""One reference for many scenarios: replays what an engine did, or speculates and generates by itself.

Conditioned by default: a replayed round starts from what the engine had committed and follows its proposals, so one
wrong round is one finding. Every request is computed alone. This module must not judge, and must see an engine's
trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.contract.trace import Event, RoundRecord, Trace
from harness.contract.types import Phase, RequestSpec, Scenario, SpecConfig
from reference import alone
from reference.chain import Sight
from reference.engine_view import EngineView, Turn
from reference.model import Head, Target
from reference.stories import Story, stories, where_of
from reference.turns import Conditions, Reading, Where, Writer, decode_rows, handed_rows, prefill_rows, rotated_rows
from reference.verify import Coins, Walk, draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Greedy text and, for each token, how far its logit was above the next best one."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


class ReferenceSession:
    """Target and draft head with the speculation settings they are asked about."""

    def __init__(self, target: Target, head: Head, spec: SpecConfig, *, sight: Sight = "ancestors") -> None:
        if spec.algorithm != head.algorithm:
            raise ValueError(f"algorithm is {spec.algorithm!r}; the head is made for {head.algorithm!r}")
        self.target, self.head, self.spec, self.sight = target, head, spec, sight

    def generate(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
        """Greedy text without speculation, one whole sequence a token; a stop id is kept and ends it."""
        return list(self.generate_with_margins(prompt, max_new_tokens, stop_ids).tokens)

    @torch.inference_mode()
    def generate_with_margins(
        self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Generated:
        """As `generate`, with the margin of each choice, by which ties are recognised."""
        tokens, margins = list(prompt), list[float]()
        while len(margins) < max_new_tokens:
            logits = self.target.logits(self.target.forward(torch.tensor(tokens))[-1])
            best, second = torch.sort(logits, descending=True, stable=True).values[:2].tolist()
            tokens.append(int(logits.argmax()))
            margins.append(best - second)
            if tokens[-1] in stop_ids:
                break
        return Generated(tokens=tuple(tokens[len(prompt) :]), margins=tuple(margins))

    @torch.inference_mode()
    def confirm(self, prompt: Sequence[int], claim: Sequence[int]) -> Generated | None:
        """`claim` as greedy text if one whole-sequence forward chooses each of its tokens, else None.

        Causality makes the rows of one forward those that token-by-token decoding would see, as long as every
        earlier token was chosen too.
        """
        rows = self.target.forward(torch.tensor([*prompt, *claim[:-1]]))[len(prompt) - 1 :]
        logits = self.target.logits(rows)
        if logits.argmax(-1).tolist() != list(claim):
            return None
        best = torch.topk(logits, 2, dim=-1).values
        return Generated(tokens=tuple(claim), margins=tuple((best[:, 0] - best[:, 1]).tolist()))

    @torch.inference_mode()
    def replay(self, scenario: Scenario, engine: Trace) -> Trace:
        """The rows `engine` should have for the rounds it ran (see the row contract); never raises on a bad trace.

        A request whose committed tokens become unknown is left out from there, with an event 'reference_stopped'.
        """
        view = EngineView(engine, self.spec, self.target.config.vocab)
        writer, events = Writer(), list[Event]()
        for request in scenario.requests:
            for story in stories(request, view):
                heat = (request.temperature or 1.0) if scenario.engine.rejection else 0.0
                events += self._replay(story, view, writer, temperature=request.temperature, heat=heat)
                if story.why:
                    events.append(_stopped(*story.why))
                    break
        rows, tensors = writer.build()
        return Trace(
            side="reference",
            scenario_id=engine.scenario_id,
            header=self._header("replay"),
            rows=rows,
            rounds=engine.rounds,
            events=tuple(events),
            tensors=tensors,
        )

    def _replay(
        self, story: Story, view: EngineView, writer: Writer, *, temperature: float, heat: float = 0.0
    ) -> list[Event]:
        """Writes the rows; the events are one 'sampled' a round that coins decided (see `sampled`).

        heat: the temperature at which drafts were drawn (SGLang takes 1 for a greedy request), 0 where they were not.
        """
        reading = Reading.of(self.head, story.tokens)
        rounds: list[tuple[Where, Conditions]] = []
        before: Turn | None = None
        for turn, committed in story.turns:
            where = where_of(turn.record, rid=turn.rid, epoch=turn.epoch, committed=turn.start)
            if turn.record.mode == "PREBUILT":
                handed_rows(writer, where, self.head, reading, t=self.spec.t)
                before = turn
                continue
            if turn.record.mode == "PREFILL":
                chosen = view.target_choice(turn) if temperature > 0 else ()
                prefill_rows(writer, where, self.head, reading, turn.length, chosen=chosen)
                phase, length = Phase.DRAFT_PREFILL, turn.length
            else:
                known = view.conditions(turn, before)
                rounds.append((where, replace(known, committed=committed) if temperature > 0 else known))
                phase, length = Phase.EXTEND, len(committed)
            if not view.is_last(turn) or view.has(turn, phase):  # nobody needs proposals after a request's end
                drawn = view.proposed(turn) if heat else ()
                rotated_rows(
                    writer,
                    where,
                    phase,
                    self.head,
                    reading,
                    length=length,
                    t=self.spec.t,
                    drawn=drawn,
                    heat=heat or 1.0,
                )
            before = turn
        walks = decode_rows(
            writer, self.head, reading, self.spec, rounds, sight=self.sight, temperature=temperature, heat=heat
        )
        return sampled(rounds, walks) if temperature > 0 else []

    @torch.inference_mode()
    def speculate(
        self,
        request: RequestSpec,
        *,
        chunk: int | None = None,
        scenario_id: str = "",
        uniform: Callable[[], float] | None = None,
    ) -> Trace:
        """Speculate freely and alone: the prompt in chunks of `chunk`, then decode rounds until the request ends.

        uniform: where coins come from, for a request with a temperature; each round's are an event 'coins'. ValueError
        if this kind of draft draws none.
        """
        writer, events = Writer(), list[Event]()
        records, end = alone.speculate(request, self._drafter(request, writer, events, uniform), chunk=chunk)
        rows, tensors = writer.build()
        return Trace(
            side="reference",
            scenario_id=scenario_id,
            header=self._header("speculate"),
            rows=rows,
            rounds=tuple(records),
            ends=(end,),
            events=tuple(events),
            tensors=tensors,
        )

    def _drafter(
        self, request: RequestSpec, writer: Writer, events: list[Event], uniform: Callable[[], float] | None
    ) -> alone.Drafter:
        return _HeadAlone(self, request, writer, events, uniform)

    def _header(self, mode: str) -> dict[str, Any]:
        dtype = str(self.target.embed.dtype).removeprefix("torch.")
        return {"reference": mode, "torch": torch.__version__, "dtype": dtype, "spec": self.spec.model_dump()}


class _HeadAlone:
    """One request speculating with a head that drafts step by step. uniform: where coins come from, if it draws any."""

    layers = 1

    def __init__(
        self,
        session: ReferenceSession,
        request: RequestSpec,
        writer: Writer,
        events: list[Event],
        uniform: Callable[[], float] | None,
    ) -> None:
        self._session, self._writer, self._events, self._uniform = session, writer, events, uniform
        self._temperature, self.drafts = request.temperature, session.spec.k - 1
        self.tokens = list(request.prompt)
        first = session.target.logits(session.target.forward(torch.tensor(self.tokens))[-1])
        self._drawn: tuple[int, ...] = ()
        if uniform is not None:
            self._drawn = (draw((first.double() / request.temperature).softmax(-1).tolist(), uniform())[0],)
        self.tokens.append(self._drawn[0] if self._drawn else int(first.argmax()))
        self._reading = Reading.of(session.head, self.tokens)

    def chunk(self, where: Where, length: int, *, final: bool) -> None:
        chosen = self._drawn if final else ()
        prefill_rows(self._writer, where, self._session.head, self._reading, length, chosen=chosen)
        self._rotated(where, Phase.DRAFT_PREFILL, length)

    def decode(self, where: Where) -> int:
        session = self._session
        coins = None if self._uniform is None else Coins.drawn(self._uniform, session.spec.n)
        if coins is not None:
            self._events.append(alone.coins_event(where, coins))
        (walk,) = decode_rows(
            self._writer,
            session.head,
            self._reading,
            session.spec,
            [(where, Conditions(coins=coins))],
            sight=session.sight,
            temperature=self._temperature,
        )
        self.tokens += walk.tokens
        self._reading = Reading.of(session.head, self.tokens)
        self._rotated(where, Phase.EXTEND, len(walk.tokens))
        return len(walk.tokens)

    def _rotated(self, where: Where, phase: Phase, length: int) -> None:
        head, t = self._session.head, self._session.spec.t
        rotated_rows(self._writer, where, phase, head, self._reading, length=length, t=t)

    def close(self, records: list[RoundRecord]) -> None:
        """Every turn's rows were written when it was taken."""


def sampled(rounds: Sequence[tuple[Where, Conditions]], walks: Sequence[Walk]) -> list[Event]:
    """Event('sampled') for each round that coins decided: rid, round, and the walk's margin."""
    decided = [(where, walk) for (where, known), walk in zip(rounds, walks, strict=True) if known.coins is not None]
    return [
        Event(
            name="sampled",
            tick=where.tick,
            dp_rank=where.dp_rank,
            data={"rid": where.rid, "epoch": where.epoch, "committed": where.committed, "margin": walk.margin},
        )
        for where, walk in decided
    ]


def _stopped(turn: Turn, why: str) -> Event:
    data = {"rid": turn.rid, "round": turn.record.index, "why": why}
    return Event(name="reference_stopped", tick=turn.record.tick, dp_rank=turn.record.dp_rank, data=data)
