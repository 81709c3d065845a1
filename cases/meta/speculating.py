"""A reference that speculates by itself: the trace that an engine without a fault would leave of one request.

Free speculation decides its own rounds, and its rows are then written as those of an engine that reported nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cases.checkpoints import Checkpoint
from harness.contract.batches import Part
from harness.contract.requests import RequestSpec
from harness.contract.rows import RowBuilder
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.contract.trace import Event, RequestEnd, RoundRecord, Trace
from harness.contract.types import Phase
from harness.driving.oracle import Oracle
from reference.draft import best
from reference.engine_view import Conditions, EngineView
from reference.logit_rules import Rules
from reference.mtp import MtpHead
from reference.pairs import load_pair
from reference.rounds import Drafts, decode_rows, write
from reference.rows import Writer
from reference.session import ReferenceSession
from reference.timeline import RequestTimeline
from reference.verify import Uniforms, draw


class FreeSession(ReferenceSession):
    """A reference session that also speculates."""

    @classmethod
    def of(cls, pair: Checkpoint, spec: SpecConfig | None = None, **more: Any) -> FreeSession:
        """The session of a tiny pair."""
        return cls(*load_pair(pair.target, pair.draft), spec or SpecConfig(), **more)

    def generate(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
        """Greedy text without speculation, token by token; a stop id is kept and ends it."""
        return list(self.generate_with_margins(prompt, max_new_tokens, stop_ids).tokens)

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
        uniform: where uniform numbers come from, for a request with a temperature; events 'uniforms' hold each round's.
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


def drawing(seed: int) -> Callable[[], float]:
    """Uniform numbers for requests with a temperature."""
    random = np.random.default_rng(seed)
    return lambda: float(random.random())


def answered(pair: Checkpoint, scenario: Scenario, trace: Trace, **oracle: Any) -> Trace:
    """What the reference says of an engine's trace. oracle: fields of Oracle."""
    return Oracle(target=pair.target, draft=pair.draft, **oracle).answer(scenario, trace)


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
        "uniforms": {part.rid: {"nodes": list(numbers.nodes), "final": numbers.final}},
    }
    return Event(name="uniforms", scheduler_step=part.record.scheduler_step, dp_rank=part.record.dp_rank, data=data)
