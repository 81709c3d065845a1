"""What a replay says of texts beside rows: which tokens grammars allow at every row that chooses, and where texts end.

Conditioned, as rows are: at the nodes of the tree that was verified, behind the tokens that were committed. This module
must not judge, and must see an engine's trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.contract.batches import Part, event_at
from harness.contract.requests import GRAMMARS, RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.contract.trace import Event, Trace
from harness.contract.types import Phase
from reference.engine_view import EngineView
from reference.languages import Language, NoLanguageError
from reference.spelling import Spelling
from reference.timeline import timelines

#: What reasoning models end their thoughts with, by SGLang's name of their parser.
THINK_ENDS = {"qwen3": "</think>", "deepseek-r1": "</think>"}


@dataclass(slots=True, kw_only=True)
class Constraints:
    """The languages of a scenario's requests. why: rid -> why there is no second opinion on its grammar."""

    scenario: Scenario
    spelling: Spelling
    vocab: int
    ends: Sequence[int]
    languages: dict[str, Language] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for request in self.scenario.requests:
            if any(getattr(request, key) is not None for key in GRAMMARS):
                try:
                    self.languages[request.rid] = self._language(request)
                except NoLanguageError as error:
                    self.why[request.rid] = str(error)

    def _language(self, request: RequestSpec) -> Language:
        begins, parser = None, self.scenario.engine.reasoning_parser
        if request.require_reasoning and parser is not None:
            begins = self.spelling.one(THINK_ENDS.get(parser, ""))
            if begins is None:
                raise NoLanguageError(f"what ends the thoughts of {parser} is no token")
        ends = request.stops(self.ends)
        return Language(request, self.spelling, vocab=self.vocab, ends=ends, begins=begins)

    def events(self, engine: Trace, spec: SpecConfig) -> Iterator[Event]:
        """'allowed' of each row of a constrained request that chooses, 'unread' of one without a second opinion, and
        'written' of each request: where its text ends, and what comes back of it.
        """
        view = EngineView(engine, spec, self.vocab)
        answers = {end.rid: end.output_ids for end in engine.ends}
        for request in self.scenario.requests:
            prompt, known = len(request.input_ids), tuple[int, ...]()
            for timeline in timelines(request, view):
                known, before = tuple(timeline.tokens[prompt:]), None
                for part, _ in timeline.parts:
                    if request.rid in self.languages:
                        yield from self._allowed(view, request, part, before, known)
                    before = part
            if request.rid in self.why:
                yield Event(name="unread", scheduler_step=0, data={"rid": request.rid, "why": self.why[request.rid]})
            output = answers.get(request.rid, ())
            yield self._written(request, output, max(known, output, key=len))

    def _allowed(
        self, view: EngineView, request: RequestSpec, part: Part, before: Part | None, known: tuple[int, ...]
    ) -> Iterator[Event]:
        """Of the token after a prompt, or of every node of a verified tree; known: its output, this part's included."""
        language, mode = self.languages[request.rid], part.record.mode
        if mode == "PREFILL" and part.final:
            phase, lines = Phase.PREFILL, [known[: part.start + part.length - len(request.input_ids)]]
        elif mode == "DECODE" and (tree := view.conditions(part, before).tree) is not None:
            root = part.start - len(request.input_ids)
            phase, lines = Phase.VERIFY, [(*known[:root], *line) for line in tree.lines()]
        else:
            return
        bits, unspelled = [_packed(language.allowed(line)) for line in lines], list(language.unspelled)
        yield event_at(part, "allowed", phase=str(phase), bits=bits, unspelled=unspelled)

    def _written(self, request: RequestSpec, output: tuple[int, ...], known: tuple[int, ...]) -> Event:
        stop, own = self.spelling.stop(request, known), self.spelling.stop(request, output)
        data = {
            "rid": request.rid,
            "length": None if stop is None else stop.length,
            "matched": [] if stop is None else list(stop.matched),
            "text": self.spelling.answered(request, output, own, ends=request.stops(self.ends)),
        }
        return Event(name="written", scheduler_step=0, data=data)


def _packed(allowed: np.ndarray | None) -> str | None:
    """One bit a token, hexadecimal, as engines write masks; None where nothing is said."""
    return None if allowed is None else np.packbits(allowed, bitorder="little").tobytes().hex()
