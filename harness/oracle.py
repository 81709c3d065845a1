"""The reference side of a run: loads checkpoints once, replays what an engine did, and generates the plain text.

The only control module that touches torch, through `reference/`; it must not judge and must not know an engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch

from harness.deviations import HEADER, SLOT_CACHE
from harness.trace import Event, Trace
from harness.types import RequestSpec, Scenario, SpecConfig
from reference.chain import Sight
from reference.model import Target
from reference.pair import AnyHead, load_pair, session_of
from reference.session import Generated, ReferenceSession


@dataclass(slots=True)
class Oracle:
    """Reference sessions by speculation settings over one checkpoint pair; raises CheckpointError for an unfit pair."""

    target: Path
    draft: Path
    #: ids of harness.deviations to take for granted
    assumed: tuple[str, ...] = ()
    _models: tuple[Target, AnyHead] | None = None
    _sessions: dict[SpecConfig, ReferenceSession] = field(default_factory=dict)
    _texts: dict[tuple[tuple[int, ...], int, tuple[int, ...]], Generated] = field(default_factory=dict)

    def load(self) -> Oracle:
        """Read the weights (idempotent); worth doing while an engine boots."""
        if self._models is None:
            torch.set_num_threads(1)  # tiny matrices: more threads only get in the engine's way
            self._models = load_pair(self.target, self.draft, torch.float32)
        return self

    def answer(self, scenario: Scenario, engine: Trace) -> Trace:
        """The reference trace for what the engine did, with one 'greedy' event a request (see losslessness)."""
        reference = self._session(scenario.spec).replay(scenario, engine)
        outputs = {end.rid: end.output_ids for end in engine.ends}
        texts = tuple(
            self._greedy(scenario.spec, request, claim=outputs.get(request.rid, ())) for request in scenario.requests
        )
        header = reference.header | ({HEADER: list(self.assumed)} if self.assumed else {})
        return dataclasses.replace(reference, events=reference.events + texts, header=header)

    def _session(self, spec: SpecConfig) -> ReferenceSession:
        if spec not in self._sessions:
            target, head = self.load()._models or (None, None)
            assert target is not None
            assert head is not None
            sight: Sight = "slots" if SLOT_CACHE.id in self.assumed and SLOT_CACHE.shows_in(spec) else "ancestors"
            self._sessions[spec] = session_of(target, head, spec, sight=sight)
        return self._sessions[spec]

    def _greedy(self, spec: SpecConfig, request: RequestSpec, *, claim: tuple[int, ...]) -> Event:
        """The plain greedy text. A claim that one forward confirms token by token *is* that text, by induction."""
        key = (request.prompt, request.max_new_tokens, request.stop_ids)
        if key not in self._texts:
            session = self._session(spec)
            confirmed = session.confirm(request.prompt, claim) if _is_whole(claim, request) else None
            self._texts[key] = confirmed or session.generate_with_margins(*key)
        text = self._texts[key]
        data = {"rid": request.rid, "output_ids": list(text.tokens), "margins": list(text.margins)}
        return Event(name="greedy", tick=0, data=data)


def _is_whole(claim: tuple[int, ...], request: RequestSpec) -> bool:
    """Whether a text has the length that greedy decoding would give it: up to its first stop id, or the limit."""
    stops = [place for place, token in enumerate(claim) if token in request.stop_ids]
    whole = min(stops[0] + 1, request.max_new_tokens) if stops else request.max_new_tokens
    return bool(claim) and len(claim) == whole


def text_identical(engine: Trace, reference: Trace) -> bool | None:
    """Whether every request's text equals the plain greedy text as far as it got; None if there is no text at all."""
    plain = {event.data["rid"]: tuple(event.data["output_ids"]) for event in reference.events if event.name == "greedy"}
    compared = [(end, plain[end.rid]) for end in engine.ends if end.rid in plain and end.output_ids]
    if not compared:
        return None
    return all(
        end.output_ids == text[: len(end.output_ids)] and (end.reason == "abort" or len(end.output_ids) == len(text))
        for end, text in compared
    )
