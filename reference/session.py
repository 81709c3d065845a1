"""One reference for many scenarios: replays what an engine did, or speculates and generates by itself.

Conditioned by default: a replayed round starts from what the engine had committed and follows its proposals, so one
wrong round is one finding. Every request is computed alone. This module must not judge, and must see an engine's
trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from harness.contract.trace import Event, RequestEnd, RoundRecord, Trace
from harness.contract.types import Phase, RequestSpec, Scenario, SpecConfig
from reference.chain import Sight
from reference.engine_view import EngineView, Turn
from reference.model import Head, Target
from reference.turns import Conditions, Reading, Where, Writer, decode_rows, handed_rows, prefill_rows, rotated_rows
from reference.verify import Coins, Walk, draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Greedy text and, for each token, how far its logit was above the next best one."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What one request lived through between two restarts.

    tokens: prompt and everything committed; turns: those that can be derived; committed: what each turn committed
    (empty if unknown); why: what stopped the reference and where, or None.
    """

    tokens: list[int]
    turns: list[tuple[Turn, tuple[int, ...]]]
    why: tuple[Turn, str] | None


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

        uniform: where coins come from, for a request with a temperature; each round's are an event 'coins'.
        """
        writer, rounds, events = Writer(), list[RoundRecord](), list[Event]()
        tokens, prompt = list(request.prompt), len(request.prompt)
        first = self.target.logits(self.target.forward(torch.tensor(tokens))[-1])
        drawn: tuple[int, ...] = ()
        if uniform is not None:
            drawn = (draw((first.double() / request.temperature).softmax(-1).tolist(), uniform())[0],)
        tokens.append(drawn[0] if drawn else int(first.argmax()))
        reading = Reading.of(self.head, tokens)
        for start in range(0, prompt, chunk or prompt):
            length = min(chunk or prompt, prompt - start)
            record = record_of(request, len(rounds), "PREFILL", start, length, final=start + length == prompt)
            where = where_of(record, rid=request.rid, epoch=0, committed=start)
            prefill_rows(writer, where, self.head, reading, length, chosen=drawn if record.final[0] else ())
            rotated_rows(writer, where, Phase.DRAFT_PREFILL, self.head, reading, length=length, t=self.spec.t)
            rounds.append(record)
        while (output := ended(request, tokens[prompt:])) is None:
            index, c = len(rounds), len(tokens) - 1
            where = where_of(record_of(request, index, "DECODE", c, 0), rid=request.rid, epoch=0, committed=c)
            coins = None if uniform is None else Coins.drawn(uniform, self.spec.n)
            events += [] if coins is None else [coins_event(where, coins)]
            (walk,) = decode_rows(
                writer,
                self.head,
                reading,
                self.spec,
                [(where, Conditions(coins=coins))],
                sight=self.sight,
                temperature=request.temperature,
            )
            tokens += walk.tokens
            reading, length = Reading.of(self.head, tokens), len(walk.tokens)
            rotated_rows(writer, where, Phase.EXTEND, self.head, reading, length=length, t=self.spec.t)
            rounds.append(record_of(request, index, "DECODE", c, length, k=self.spec.k))
        rows, tensors = writer.build()
        return Trace(
            side="reference",
            scenario_id=scenario_id,
            header=self._header("speculate"),
            rows=rows,
            rounds=tuple(rounds),
            ends=(RequestEnd(rid=request.rid, tick=len(rounds) - 1, reason=output[0], output_ids=output[1]),),
            events=tuple(events),
            tensors=tensors,
        )

    def _header(self, mode: str) -> dict[str, Any]:
        dtype = str(self.target.embed.dtype).removeprefix("torch.")
        return {"reference": mode, "torch": torch.__version__, "dtype": dtype, "spec": self.spec.model_dump()}


def ended(request: RequestSpec, output: list[int]) -> tuple[str, tuple[int, ...]] | None:
    """Finish reason and output if `output` ends the request, cut where it ends; None if it goes on."""
    stops = [index for index, token in enumerate(output) if token in request.stop_ids]
    if stops and stops[0] < request.max_new_tokens:
        return "stop", tuple(output[: stops[0] + 1])
    if len(output) >= request.max_new_tokens:
        return "length", tuple(output[: request.max_new_tokens])
    return None


def stories(request: RequestSpec, view: EngineView) -> Iterator[Story]:
    """One story an epoch; after a restart the prompt is everything known so far."""
    tokens, in_flight = list(request.prompt), 0
    for _, group in groupby(view.turns.get(request.rid, []), key=lambda turn: turn.epoch):
        turns = list(group)
        if in_flight and _reached(turns) == len(tokens) - in_flight:
            del tokens[-in_flight:]
        story = _follow(tokens, turns, view)
        tokens, in_flight = list(story.tokens), _last_committed(story)
        yield story


def _reached(turns: list[Turn]) -> int:
    """How many tokens a request had when it was prefilled or handed over; -1 if it never was to the end."""
    ends = {"PREFILL": 0, "PREBUILT": 1}  # the last token of what is handed over has no KV yet
    begun = (turn for turn in turns if turn.record.mode in ends and turn.final)
    return next((turn.start + turn.length + ends[turn.record.mode] for turn in begun), -1)


def _last_committed(story: Story) -> int:
    """Tokens of the decode round a story ends with. A request that is retracted while its verify is in flight, which
    overlap scheduling allows, never gets them and commits them anew.
    """
    turn, committed = story.turns[-1] if story.turns else (None, ())
    return len(committed) if turn is not None and turn.record.mode == "DECODE" else 0


def _follow(tokens: list[int], turns: list[Turn], view: EngineView) -> Story:
    """Collect committed tokens turn by turn until they become unknown."""
    tokens, derived = list(tokens), list[tuple[Turn, tuple[int, ...]]]()
    for turn in turns:
        began = view.has(turn, Phase.DRAFT) or view.has(turn, Phase.VERIFY)
        if turn.record.mode == "DECODE" and turn.length == 0 and not began:
            continue  # in the batch, but not in its forwards
        why = _impossible(turn, len(tokens))
        if why:
            return Story(tokens=tokens, turns=derived, why=(turn, why))
        if turn.record.mode == "PREBUILT":  # a hand-over commits nothing
            derived.append((turn, ()))
            continue
        if turn.record.mode == "PREFILL":
            committed = view.first_token(turn) if turn.final else ()
            unknown = turn.final and not committed
        else:
            committed = view.accepted(turn)
            unknown = not committed
        derived.append((turn, committed))
        if unknown:
            return Story(tokens=tokens, turns=derived, why=(turn, "the tokens it committed are not in the trace"))
        tokens += committed
    return Story(tokens=tokens, turns=derived, why=None)


def _impossible(turn: Turn, known: int) -> str | None:
    """Why a request with `known` tokens cannot have had this turn, or None."""
    end, mode = turn.start + turn.length, turn.record.mode
    if mode == "PREFILL":
        if turn.start < 0 or turn.length < 1 or (end != known if turn.final else end >= known):
            return f"prefill rows {turn.start}..{end - 1} (final: {turn.final}) do not fit the {known} tokens it has"
        return None
    if mode in ("DECODE", "PREBUILT"):
        return None if turn.start == known - 1 else f"committed length {turn.start}, but it has {known} tokens"
    return f"rounds of mode {mode} cannot be replayed"


def coins_event(where: Where, coins: Coins) -> Event:
    """What a probe tells of a sampled verify, for one request alone."""
    own = {where.rid: {"nodes": list(coins.nodes), "final": coins.final}}
    data = {"round": where.round, "rule": "reference", "thresholds": [coins.single, coins.together], "coins": own}
    return Event(name="coins", tick=where.tick, dp_rank=where.dp_rank, data=data)


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


def where_of(record: RoundRecord, *, rid: str, epoch: int, committed: int) -> Where:
    return Where(
        rid=rid,
        epoch=epoch,
        dp_rank=record.dp_rank,
        round=record.index,
        tick=record.tick,
        committed=committed,
    )


def record_of(
    request: RequestSpec,
    index: int,
    mode: str,
    start: int,
    length: int,
    *,
    final: bool = False,
    k: int = 1,
    layers: int = 1,
) -> RoundRecord:
    """A round with one request; one tick a round. layers: draft forwards a catch-up takes."""
    prefill = {Phase.PREFILL: 1, Phase.DRAFT_PREFILL: layers}
    decode = {Phase.DRAFT: k - 1, Phase.VERIFY: 1, Phase.EXTEND: layers}
    return RoundRecord(
        index=index,
        tick=index,
        dp_rank=request.dp_rank,
        tp_rank=0,
        mode=mode,
        rids=(request.rid,),
        epochs=(0,),
        starts=(start,),
        lens=(length,),
        final=(final,),
        forwards={str(phase): count for phase, count in (prefill if mode == "PREFILL" else decode).items()},
    )
