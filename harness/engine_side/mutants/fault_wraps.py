"""Arms mutants for one scenario, and lets them act where `fault_sites` asks.

Engine side: standard library and torch only; loaded when a scenario first asks for a mutant, so that an engine that is
never asked runs none of this. It must never write to the recorder: the probe sees what the engine computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...both_sides.faults import FAULTS, Fault
from ..probes.probe import Probe
from . import (  # noqa: F401  (importing them makes their acts known)
    fault_acts_eagle3,
    fault_acts_layers,
    fault_acts_pool,
    fault_acts_sampled,
    fault_acts_tree,
)
from .fault_acts import ACTS, Scene, Share, Values
from .fault_acts_idle import IDLE_ACTS
from .fault_graphs import Captured
from .fault_handoff import HandoffSites
from .fault_sites import FORWARD_ACTS, Sites
from .fault_values import differs


class FaultBroken(Exception):
    """A mutant's own code failed: nothing can be said about the checks."""


@dataclass(slots=True)
class Armed:
    fault: Fault
    first: int  # batches before this one, counted from 1, stay sound
    fired: int = 0
    memory: dict[Any, Any] = field(default_factory=dict)


class Faults:
    """All mutants of one scheduler process: sound until armed, sound again after `disarm`."""

    #: mutants that this engine's graphs hold: those act there, and nowhere else
    captured: Captured | None = None

    def __init__(self, probe: Probe, scheduler: Any) -> None:
        self.probe, self.recorder, self.release = probe, probe.recorder, probe.release
        self._page = int(scheduler.token_to_kv_pool_allocator.page_size)
        self.armed: list[Armed] = []
        self.batches = 0
        self.outputs: dict[str, Any] = {}
        self.captured = None if probe.graphs is None else probe.graphs.mutants
        self._missing = Sites(self).install(scheduler)
        if getattr(scheduler, "disagg_metadata_buffers", None) is not None:
            self._missing += HandoffSites(self).install()

    def arm(self, name: str, *, first: int) -> None:
        """Let the mutant act from the first-th batch of the scenario on; LookupError if it cannot act here."""
        fault = FAULTS[name]
        if fault.act not in (*ACTS, *FORWARD_ACTS, *IDLE_ACTS):
            raise LookupError(f"mutant {name}: this version has no act {fault.act!r}")
        if self._missing:
            raise LookupError(f"mutant {name}: nothing to wrap at {', '.join(self._missing)}")
        self.armed.append(Armed(fault, first))

    def disarm(self) -> None:
        self.armed, self.batches, self.outputs = [], 0, {}
        if self.captured is not None:
            self.captured.forget()

    def batch_begins(self, number: int) -> None:
        """number: of the batch, from 1."""
        self.batches = number
        if self.captured is not None:
            self.captured.arm(armed.fault.id for armed in self.armed if number >= armed.first)

    def fired(self) -> dict[str, int]:
        """How often each armed mutant really changed a value."""
        inside = {} if self.captured is None else self.captured.fired()
        return {armed.fault.id: armed.fired + inside.get(armed.fault.id, 0) for armed in self.armed}

    def apply(
        self, site: str, values: Values, *, phase: str = "", step: int = 0, shares: Sequence[Share] = ()
    ) -> Values:
        """What the armed mutants of a site make of `values`: only those that really became others."""
        changed: Values = {}
        for armed in self.at(site, phase):
            scene = Scene(
                args=armed.fault.args,
                memory=armed.memory,
                phase=phase,
                step=step,
                batch=self.batches,
                page=self._page,
                shares=list(shares),
                logits=self._logits(phase),
                guesses=self._guesses(),
            )
            try:
                made = ACTS[armed.fault.act](scene, values)
            except Exception as error:  # ours, so it must not look like a crash of the engine
                raise FaultBroken(f"mutant {armed.fault.id}: {type(error).__name__}: {error}") from error
            made = {name: value for name, value in made.items() if differs(value, values[name])}
            armed.fired += bool(made)
            changed |= made
        return changed

    def at(self, site: str, phase: str) -> list[Armed]:
        """Mutants that may act here and now; none while nothing is recorded."""
        if not self.armed or not self.recorder.active:
            return []
        return [
            armed
            for armed in self.armed
            if armed.fault.site == site
            and (self.captured is None or armed.fault.id not in self.captured)
            and self.batches >= armed.first - (self.recorder.round is None)
            and (not armed.fault.phases or phase in armed.fault.phases)
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
            shares.append(Share(current.rids[i], first, length, current.starts[i], current.final[i], current.epochs[i]))
            first += length if packed else width
        return shares
