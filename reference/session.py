"""One reference for many scenarios: replays what an engine did, and generates by itself.

Conditioned by default: a replayed round starts from what the engine had committed and follows its proposals, so one
wrong round is one finding. Every request is computed alone. This module must not judge, and must see an engine's trace
only through `EngineView`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from harness.contract.batches import Part
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.contract.trace import EOS, WINDOW, Event, Trace
from reference.departures import Departure
from reference.draft import best
from reference.engine_view import EngineView
from reference.expected import expected_accepts
from reference.head_drafts import HeadDrafts
from reference.languages import Language
from reference.layer_drafts import LayerDrafts
from reference.logit_rules import Rules
from reference.logprobs import logprobs
from reference.model import Head, Target
from reference.mtp import MtpHead
from reference.recurrent import Sums, recurrent_states, stacked
from reference.rounds import Drafts, write
from reference.routing_ties import watched
from reference.rows import Writer
from reference.timeline import RequestTimeline, timelines


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

    @torch.inference_mode()
    def generate_with_margins(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        rules: Rules | None = None,
        claim: Sequence[int] = (),
    ) -> Generated:
        """Greedy text without speculation, by rules, with the margin of each choice; a stop id is kept and ends it.

        claim: a text that may begin as this one does; as far as it does, its tokens are not generated one by one.
        """
        begun = self._confirmed(prompt, claim[:max_new_tokens], rules)
        whole = next((place + 1 for place, token in enumerate(begun.tokens) if token in stop_ids), len(begun.tokens))
        tokens, margins, trunk = list(begun.tokens[:whole]), list(begun.margins[:whole]), None
        new = [*prompt, *tokens]
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop_ids):
            trunk = self.target.read(new, keep=(self.target.layers,), after=trunk)
            logits = self.target.logits(trunk.states[self.target.layers][-1])
            if rules is not None:
                logits = rules.adjusted(logits, tokens)
            first, second = torch.topk(logits, 2).values.tolist()
            new = [best(logits, 1)[0]]
            tokens += new
            margins.append(first - second)
        return Generated(tokens=tuple(tokens), margins=tuple(margins))

    @torch.inference_mode()
    def confirm(self, prompt: Sequence[int], claim: Sequence[int], rules: Rules | None = None) -> Generated | None:
        """`claim` as greedy text if one forward over all of it chooses each of its tokens, else None."""
        found = self._confirmed(prompt, claim, rules)
        return found if found.tokens == tuple(claim) else None

    def _confirmed(self, prompt: Sequence[int], claim: Sequence[int], rules: Rules | None) -> Generated:
        """How far `claim` is greedy text, by one forward over all of it.

        Causality makes the rows of one forward those that token-by-token decoding would see, as long as every
        earlier token was chosen too.
        """
        claim = tuple(itertools.takewhile(lambda token: 0 <= token < self.target.vocab, claim))
        if not claim:
            return Generated(tokens=(), margins=())
        logits = self.target.logits(self._final((*prompt, *claim[:-1]))[len(prompt) - 1 :])
        if rules is not None and rules.adjusts:
            adjusted = list[Tensor]()
            for place, row in enumerate(logits):  # a grammar says nothing behind what it forbids
                adjusted.append(rules.adjusted(row, claim[:place]))
                if int(adjusted[-1].argmax()) != claim[place]:
                    break
            logits = torch.stack(adjusted)
        right = zip(claim, logits.argmax(-1).tolist(), strict=False)
        count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], right))
        top = torch.topk(logits[:count], 2, dim=-1).values
        return Generated(tokens=claim[:count], margins=tuple((top[:, 0] - top[:, 1]).tolist()))

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
        view = EngineView(engine, self.spec, self.target.vocab)
        departures = self._departures()
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
            if recurrent := recurrent_states(drafts, view, sum(len(one["state"]) for one in states)):
                events.append(recurrent[0])
                states.append(recurrent[1])
        found = self._trace("replay", engine.scenario_id, writer, rounds=engine.rounds, events=events)
        return replace(found, tensors={**found.tensors, **stacked(states)})

    def _in_force(self, timeline: RequestTimeline, heads: Sequence[tuple[int, Head | MtpHead]]) -> Head | MtpHead:
        began = timeline.parts[0][0].record.scheduler_step if timeline.parts else 0
        return next((head for step, head in reversed(heads) if step <= began), self.head)

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


def _stopped(part: Part, why: str) -> Event:
    data = {"rid": part.rid, "round": part.record.index, "why": why}
    return Event(
        name="reference_stopped", scheduler_step=part.record.scheduler_step, dp_rank=part.record.dp_rank, data=data
    )
