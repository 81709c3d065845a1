"""The mutants that are armed for one scenario: lets them act where a site asks, and counts what they really changed.

Engine side: standard library and torch only; loaded when a scenario first asks for a mutant, so that an engine that is
never asked runs none of this. It must never write to the recorder: the probe sees what the engine computes with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...both_sides.mutants import MUTANTS, Mutant
from ..hooks import Original, around
from ..probes.probe import Probe
from ..probes.recorder import plain_rid
from . import acts_cache, acts_expressions, acts_inputs, acts_requests, acts_verify  # noqa: F401  (importing makes them known)
from .graphs import GraphMutants
from .registry import ACTS, FORWARD_ACTS, Context, Share, Values


class MutantBroken(Exception):
    """A mutant's own code failed: nothing can be said about the checks."""


@dataclass(slots=True)
class Armed:
    mutant: Mutant
    first: int  # batches before this one, counted from 1, stay sound
    fired: int = 0
    memory: dict[Any, Any] = field(default_factory=dict)


class ArmedMutants:
    """All mutants of one scheduler process: sound until armed, sound again after `disarm`."""

    def __init__(self, probe: Probe, *, page: int, tp_rank: int = 0) -> None:
        self.probe, self.recorder = probe, probe.recorder
        self.page, self.tp_rank = page, tp_rank
        self.armed: list[Armed] = []
        self.batches = 0
        #: what the newest forward of a phase returned, and the draft state that went into the newest with requests
        self.outputs: dict[str, Any] = {}
        self.states: dict[str, torch.Tensor] = {}
        #: mutants that this engine's graphs hold: those act there, and nowhere else
        self.captured: GraphMutants | None = None if probe.graphs is None else probe.graphs.mutants
        #: sites that this release does not have
        self.missing: list[str] = []

    def arm(self, name: str, *, first: int) -> None:
        """Let the mutant act from the first-th batch of the scenario on; LookupError if it cannot act here."""
        mutant = MUTANTS[name]
        if mutant.act not in (*ACTS, *FORWARD_ACTS):
            raise LookupError(f"mutant {name}: this version has no act {mutant.act!r}")
        if self.missing:
            raise LookupError(f"mutant {name}: nothing to wrap at {', '.join(self.missing)}")
        self.armed.append(Armed(mutant, first))

    def disarm(self) -> None:
        self.armed, self.batches, self.outputs = [], 0, {}
        if self.captured is not None:
            self.captured.forget()

    def batch_begins(self, number: int) -> None:
        """number: of the batch, from 1."""
        self.batches = number
        if self.captured is not None:
            self.captured.arm(armed.mutant.id for armed in self.armed if number >= armed.first)

    def fired(self) -> dict[str, int]:
        """How often each armed mutant really changed a value."""
        inside = {} if self.captured is None else self.captured.fired()
        return {armed.mutant.id: armed.fired + inside.get(armed.mutant.id, 0) for armed in self.armed}

    def apply(
        self, site: str, values: Values, *, phase: str = "", step: int = 0, shares: Sequence[Share] = ()
    ) -> Values:
        """What the armed mutants of a site make of `values`: only those that really became others."""
        changed: Values = {}
        for armed in self.at(site, phase, step=step):
            if armed.mutant.act in FORWARD_ACTS or (site == "answers" and armed.mutant.args["field"] not in values):
                continue
            context = Context(
                args=armed.mutant.args,
                memory=armed.memory,
                phase=phase,
                step=step,
                batch=self.batches,
                page=self.page,
                shares=list(shares),
                logits=self._logits(phase),
                guesses=self._guesses(),
                state=self.states.get(phase),
            )
            try:
                made = ACTS[armed.mutant.act](context, values)
            except Exception as error:  # ours, so it must not look like a crash of the engine
                raise MutantBroken(f"mutant {armed.mutant.id}: {type(error).__name__}: {error}") from error
            made = {name: value for name, value in made.items() if differs(value, values[name])}
            armed.fired += bool(made)
            changed |= made
        return changed

    def change(self, site: str, owner: Any, names: dict[str, str], *, phase: str, shares: list[Share]) -> None:
        """Let mutants change attributes of an object of SGLang's. names: value of the site -> attribute."""
        values = {name: getattr(owner, attribute) for name, attribute in names.items()}
        for name, value in self.apply(site, values, phase=phase, shares=shares).items():
            setattr(owner, names[name], value)

    def at(self, site: str, phase: str = "", *, step: int = 0) -> list[Armed]:
        """Mutants that may act here and now; none while nothing is recorded."""
        if not self.armed or not self.recorder.active:
            return []
        return [
            armed
            for armed in self.armed
            if armed.mutant.site == site
            and (self.captured is None or armed.mutant.id not in self.captured)
            and self.batches >= armed.first - (self.recorder.round is None)
            and (not armed.mutant.phases or phase in armed.mutant.phases)
            and armed.mutant.args.get("step", step) == step
            and armed.mutant.args.get("tp_rank", self.tp_rank) == self.tp_rank
        ]

    def _logits(self, phase: str) -> torch.Tensor | None:
        """Logits of the newest forward of a phase; the worker narrows them to one row a request by itself."""
        output = self.outputs.get(phase)
        return None if output is None else output.logits_output.next_token_logits

    def _guesses(self) -> torch.Tensor | None:
        logits = self._logits("PREFILL")
        return None if logits is None else logits.argmax(dim=-1)

    def shares(self, phase: str, rows: int) -> list[Share]:
        """Which rows of a forward belong to which request of the batch; padding rows belong to none."""
        current = self.recorder.round
        if current is None or not current.rids:
            return []
        requests = current.extend_rids if phase == "EXTEND" else list(range(len(current.rids)))
        width = rows // max(1, len(requests))
        lens = [width] * len(requests)
        if phase in ("PREFILL", "DRAFT_PREFILL"):
            lens = list(current.lens)
        elif phase == "EXTEND":
            lens = [current.accept_lens[i] for i in requests]
        packed = sum(lens) == rows
        shares, first = [], 0
        for i, length in zip(requests, lens, strict=True):
            shares.append(
                Share(current.rids[i], first, length, current.starts[i], current.final[i], current.attempts[i])
            )
            first += length if packed else width
        return shares


def one_each(reqs: Iterable[Any]) -> list[Share]:
    """One share a request, where only who they are matters."""
    return [Share(plain_rid(req.rid), number, 1) for number, req in enumerate(reqs)]


def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is not other and (one.shape != other.shape or one.dtype != other.dtype or not torch.equal(one, other))


#: The module of what runs a model.
RUNNER = "sglang.srt.model_executor.model_runner"


class Place(NamedTuple):
    """A call of SGLang's, and the site that is put around it: given the original before the arguments of the call.

    outside: also around what the probe put there, which then sees what the site made of what goes in.
    """

    module: str
    dotted: str
    site: Original
    outside: bool = False


class Sites:
    """Some sites of one scheduler process. Each leaves everything as it is where no mutant acts."""

    def __init__(self, mutants: ArmedMutants, scheduler: Any) -> None:
        self._mutants, self._scheduler = mutants, scheduler
        self._probe, self._recorder, self._release = mutants.probe, mutants.recorder, mutants.probe.release

    def places(self) -> Iterator[Place]:
        """Where they are, in this release."""
        raise NotImplementedError

    def install(self) -> None:
        """Wrap every place; `ArmedMutants.missing` gets those that are not there."""
        hooks = self._probe.hooks
        known = len(hooks.missing)
        for place in self.places():
            hooks.wrap(sys.modules[place.module], place.dotted, around(place.site), innermost=not place.outside)
        self._mutants.missing += hooks.missing[known:]
