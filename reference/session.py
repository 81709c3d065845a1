"""One reference for many scenarios: replays what an engine did, or speculates and generates by itself.

Conditioned by default: a replayed round starts from what the engine had committed and follows its proposals, so one
wrong round is one finding. Every request is computed alone. Free speculation decides its own rounds, and its rows are
then written as those of an engine that reported nothing else. This module must not judge, and must see an engine's
trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from harness.contract.batches import Part
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario, SpecConfig
from harness.contract.trace import EOS, WINDOW, Event, RequestEnd, RoundRecord, RowBuilder, Trace
from harness.contract.types import Phase
from reference.departures import Departure
from reference.draft import best
from reference.engine_view import Conditions, EngineView
from reference.expected import expected_accepts
from reference.head_drafts import HeadDrafts
from reference.languages import Language
from reference.layer_drafts import LayerDrafts
from reference.leaning import watched
from reference.logit_rules import Rules
from reference.logprobs import logprobs
from reference.model import Head, Target
from reference.mtp import MtpHead
from reference.recurrent import Sums, recurrent_states, stacked
from reference.rounds import Drafts, decode_rows, write
from reference.rows import Writer
from reference.timeline import RequestTimeline, timelines
from reference.verify import Uniforms, draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Greedy text and, for each token, how far its logit was above the next best one."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


class ReferenceSession:
    """Target and draft with the speculation settings they are asked about.

    departures: kinds of known differences to follow (see reference.departures); none is the papers' algorithm.
    """

    def __init__(
        self, target: Target, head: Head | MtpHead, spec: SpecConfig, *, departures: Sequence[type[Departure]] = ()
    ) -> None:
        if spec.algorithm != head.algorithm:
            raise ValueError(
                f"algorithm is {spec.algorithm!r}; the head is made for {head.algorithm!r}: ask for scenarios of that "
                f"kind, or name a draft that is one of {spec.algorithm}"
            )
        if isinstance(head, MtpHead) and spec.num_steps > len(head.layers):
            raise ValueError(
                f"k is {spec.num_steps}; this head has {len(head.layers)} layers, and each drafts one step"
            )
        self.target, self.head, self.spec, self.departures = target, head, spec, tuple(departures)
        self._replayed = dict[tuple[int, ...], Tensor]()  # the target's last states [T,h] of the last replay's texts

    def generate(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
        """Greedy text without speculation, token by token; a stop id is kept and ends it."""
        return list(self.generate_with_margins(prompt, max_new_tokens, stop_ids).tokens)

    @torch.inference_mode()
    def generate_with_margins(
        self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int] = (), rules: Rules | None = None
    ) -> Generated:
        """As `generate`, by rules, with the margin of each choice, by which ties are recognised."""
        tokens, margins, new, trunk = list[int](), list[float](), list(prompt), None
        while len(margins) < max_new_tokens:
            trunk = self.target.read(new, keep=(self.target.layers,), after=trunk)
            logits = self.target.logits(trunk.states[self.target.layers][-1])
            if rules is not None:
                logits = rules.adjusted(logits, tokens)
            first, second = torch.topk(logits, 2).values.tolist()
            new = [best(logits, 1)[0]]
            tokens += new
            margins.append(first - second)
            if new[0] in stop_ids:
                break
        return Generated(tokens=tuple(tokens), margins=tuple(margins))

    @torch.inference_mode()
    def confirm(self, prompt: Sequence[int], claim: Sequence[int], rules: Rules | None = None) -> Generated | None:
        """`claim` as greedy text if one forward over all of it chooses each of its tokens, else None.

        Causality makes the rows of one forward those that token-by-token decoding would see, as long as every
        earlier token was chosen too.
        """
        logits = self.target.logits(self._final((*prompt, *claim[:-1]))[len(prompt) - 1 :])
        if rules is not None and rules.adjusts:
            logits = torch.stack([rules.adjusted(row, claim[:place]) for place, row in enumerate(logits)])
        if logits.argmax(-1).tolist() != list(claim):
            return None
        top = torch.topk(logits, 2, dim=-1).values
        return Generated(tokens=tuple(claim), margins=tuple((top[:, 0] - top[:, 1]).tolist()))

    @torch.inference_mode()
    def replay(
        self,
        scenario: Scenario,
        engine: Trace,
        *,
        expecting: bool = True,
        languages: Mapping[str, Language] = MappingProxyType({}),
        heads: Sequence[tuple[int, Head | MtpHead]] = (),
        adapted: Mapping[str, Head | MtpHead] = MappingProxyType({}),
    ) -> Trace:
        """The rows `engine` should have for the rounds it ran (see the row contract); never raises on a bad trace.

        A request whose committed tokens become unknown is left out from there, with an event 'reference_stopped'.
        languages: of the requests that have a grammar, by rid.
        expecting: say what the reference's own proposals would have been accepted for too (see reference.expected).
        heads: from which scheduler step on a head, with its target, took the place of the one before; in order. Whoever
        runs then was taken back before, so that no attempt has rows of two.
        adapted: rid -> the head, with its target, of a request that has an adapter.
        """
        view, departures = EngineView(engine, self.spec, self.target.vocab), self._departures()
        eos = engine.header.get(EOS, ())
        followed = list[tuple[RequestSpec, Drafts]]()
        for request in scenario.requests:
            drawn = scenario.engine.rejection_sampling and not request.greedy
            temperature = request.temperature if drawn else None
            for timeline in timelines(request, view):
                head = adapted.get(request.rid) or self._in_force(timeline, heads)
                followed.append((request, self._drafts(timeline, view, departures, temperature, head)))
                if timeline.why:
                    break
        for departure in departures:
            departure.follow(scenario, [drafts for _, drafts in followed if isinstance(drafts, LayerDrafts)])
        own = [drafts for _, drafts in followed if drafts.head is self.head]
        self._replayed = {tuple(drafts.timeline.tokens): drafts.final for drafts in own}
        writer, events, states = Writer(), list[Event](), list[Sums]()
        for request, drafts in followed:
            rules = Rules(request=request, ends=request.stops(eos), language=languages.get(request.rid))
            events += write(writer, drafts, rules, departures=departures)
            if expecting and request.greedy:
                with watched(None):  # runs in the first replay alone
                    events += expected_accepts(drafts, rules)
            if drafts.timeline.why:
                events.append(_stopped(*drafts.timeline.why))
            if recurrent := recurrent_states(drafts, view, sum(len(one.state) for one in states)):
                events.append(recurrent[0])
                states.append(recurrent[1])
        found = self._trace("replay", engine.scenario_id, writer, rounds=engine.rounds, events=events)
        return replace(found, tensors={**found.tensors, **stacked(states)})

    def _in_force(self, timeline: RequestTimeline, heads: Sequence[tuple[int, Head | MtpHead]]) -> Head | MtpHead:
        began = timeline.parts[0][0].record.scheduler_step if timeline.parts else 0
        return next((head for step, head in reversed(heads) if step <= began), self.head)

    @torch.inference_mode()
    def speculate(
        self,
        request: RequestSpec,
        *,
        chunk: int | None = None,
        scenario_id: str = "",
        uniform: Callable[[], float] | None = None,
        rules: Rules | None = None,
    ) -> Trace:
        """Speculate freely and alone: the prompt in chunks of `chunk`, then decode rounds until the request ends.

        rules: those of the request where it has a grammar, or ends at more than its stop ids.
        uniform: where uniform numbers come from, for a request with a temperature; each round's are an event 'coins'.
        ValueError if this kind of draft draws none.
        """
        if uniform is not None and isinstance(self.head, MtpHead):
            raise ValueError("MTP layers speculate freely at temperature 0 only; leave uniform out")
        tokens, parts, events = list(request.input_ids), self._chunks(request, chunk), list[Event]()
        rules = rules or Rules(request=request, ends=request.stop_token_ids)
        parts[-1] = parts[-1][0], self._first_token(rules, uniform)
        tokens += parts[-1][1]
        while (end := _ended(request, rules.ends, tokens[len(request.input_ids) :])) is None:
            part = self._part(request, len(parts), "DECODE", len(tokens) - 1, 0)
            numbers = None if uniform is None else Uniforms.drawn(uniform, self.spec.num_draft_tokens)
            events += [] if numbers is None else [_uniforms_event(part, numbers)]
            drafts = self._alone(tokens, parts, events)
            rounds = [(part, Conditions(uniforms=numbers))]
            (decided,) = decode_rows(Writer(), drafts, rounds, rules)
            new = decided.walk.tokens
            parts.append((self._part(request, len(parts), "DECODE", part.start, len(new)), new))
            tokens += new
        writer = Writer()
        write(writer, self._alone(tokens, parts, events), rules)
        ends = (RequestEnd(rid=request.rid, scheduler_step=len(parts) - 1, reason=end[0], output_ids=end[1]),)
        records = tuple(part.record for part, _ in parts)
        return self._trace("speculate", scenario_id, writer, rounds=records, events=events, ends=ends)

    @torch.inference_mode()
    def logprobs(self, rules: Rules, output: Sequence[int]) -> Event:
        """What the log-probabilities of a request are where it generated `output` (see reference.logprobs)."""
        states = self._final((*rules.request.input_ids, *output))
        return Event(name="logprobs", scheduler_step=0, data=logprobs(rules, output, states, self.target.logits))

    def _final(self, tokens: tuple[int, ...]) -> Tensor:
        """The target's last states [T,h] over T tokens; those of a text just replayed are there already."""
        for text, states in self._replayed.items():
            if text[: len(tokens)] == tokens:
                return states[: len(tokens)]
        return self.target.read(tokens, keep=(self.target.layers,)).states[self.target.layers]

    def _departures(self) -> list[Departure]:
        return [departure() for departure in self.departures]

    def _drafts(
        self,
        timeline: RequestTimeline,
        view: EngineView,
        departures: Sequence[Departure],
        temperature: float | None,
        head: Head | MtpHead,
    ) -> Drafts:
        if isinstance(head, MtpHead):
            return LayerDrafts(head, self.spec, timeline, view, departures=departures, temperature=temperature)
        return HeadDrafts(head, self.spec, timeline, view, departures=departures, temperature=temperature)

    def _alone(self, tokens: list[int], parts: list[tuple[Part, tuple[int, ...]]], events: list[Event]) -> Drafts:
        """The drafts of a request of which nobody else proposed anything."""
        nothing = Trace(side="reference", scenario_id="", header={}, rows=RowBuilder().build(), events=tuple(events))
        view = EngineView(nothing, self.spec, self.target.vocab)
        timeline = RequestTimeline(tokens=list(tokens), parts=parts)
        return self._drafts(timeline, view, self._departures(), None, self.head)

    def _first_token(self, rules: Rules, uniform: Callable[[], float] | None) -> tuple[int, ...]:
        logits = self.target.logits(self._final(rules.request.input_ids)[-1])
        if uniform is None:
            return (best(rules.adjusted(logits, ()), 1)[0],)
        return (draw(rules.distribution(logits, ())[0], uniform())[0],)

    def _chunks(self, request: RequestSpec, chunk: int | None) -> list[tuple[Part, tuple[int, ...]]]:
        """Its prompt, a batch for every `chunk` tokens; None takes it whole."""
        prompt, parts = len(request.input_ids), list[tuple[Part, tuple[int, ...]]]()
        for start in range(0, prompt, chunk or prompt):
            length = min(chunk or prompt, prompt - start)
            parts.append((self._part(request, len(parts), "PREFILL", start, length), ()))
        return parts

    def _part(self, request: RequestSpec, index: int, mode: str, start: int, length: int) -> Part:
        """A batch with this request alone; one scheduler step a batch."""
        layered = isinstance(self.head, MtpHead)
        layers, drafts = (self.spec.num_steps, 0) if layered else (1, self.spec.num_steps - 1)
        prefill = {Phase.PREFILL: 1, Phase.DRAFT_PREFILL: layers}
        decode = {Phase.DRAFT: drafts, Phase.VERIFY: 1, Phase.EXTEND: layers}
        final = mode == "PREFILL" and start + length == len(request.input_ids)
        record = RoundRecord(
            index=index,
            scheduler_step=index,
            dp_rank=request.dp_rank,
            tp_rank=0,
            mode=mode,
            rids=(request.rid,),
            attempts=(0,),
            starts=(start,),
            lens=(length,),
            final=(final,),
            forwards={str(phase): count for phase, count in (prefill if mode == "PREFILL" else decode).items()},
        )
        return Part(record=record, rid=request.rid, attempt=0, start=start, length=length, final=final)

    def _trace(self, mode: str, scenario_id: str, writer: Writer, *, events: Sequence[Event], **more: Any) -> Trace:
        rows, tensors = writer.build()
        dtype = str(self.target.dtype).removeprefix("torch.")
        header = {
            "reference": mode,
            "torch": torch.__version__,
            "dtype": dtype,
            "spec": self.spec.model_dump(),
            "providers": {"target": self.target.provider, "draft": self.head.provider},
            "notes": list(self.head.notes),
        }
        if window := getattr(self.target, "window", None):
            header[WINDOW] = window
        return Trace(
            side="reference",
            scenario_id=scenario_id,
            header=header,
            rows=rows,
            tensors=tensors,
            events=tuple(events),
            **more,
        )


def _ended(request: RequestSpec, ends: Sequence[int], output: list[int]) -> tuple[str, tuple[int, ...]] | None:
    """Finish reason and output if `output` ends the request, cut where it ends; None if it goes on."""
    stops = [index for index, token in enumerate(output) if token in ends]
    if stops and stops[0] < request.max_new_tokens:
        return "stop", tuple(output[: stops[0] + 1])
    if len(output) >= request.max_new_tokens:
        return "length", tuple(output[: request.max_new_tokens])
    return None


def _uniforms_event(part: Part, numbers: Uniforms) -> Event:
    """What a probe reports of a sampled verify, for one request alone."""
    data = {
        "round": part.record.index,
        "rule": "reference",
        "thresholds": [numbers.threshold_single, numbers.threshold_acc],
        "coins": {part.rid: {"nodes": list(numbers.nodes), "final": numbers.final}},
    }
    return Event(name="coins", scheduler_step=part.record.scheduler_step, dp_rank=part.record.dp_rank, data=data)


def _stopped(part: Part, why: str) -> Event:
    data = {"rid": part.rid, "round": part.record.index, "why": why}
    return Event(
        name="reference_stopped", scheduler_step=part.record.scheduler_step, dp_rank=part.record.dp_rank, data=data
    )
