"""Mutants inside CUDA graphs: every replay computes them beside the sound values, and a flag says which of both go on.

A replay runs no Python, so a mutant that shall act there must have been captured. An engine that is booted for mutants
captures all of them, each behind a flag on the device that is down until a scenario arms it: one boot serves them all,
and is sound while none is armed. A counter beside each flag says how often it really changed a value.

Engine side: standard library and torch only. Nothing here may wait for the device while a graph is captured, so acts
must index with slices and numbers, never with lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...both_sides.mutants import MUTANTS, Mutant
from . import acts_expressions, acts_inputs  # noqa: F401  (importing makes their acts known)
from .registry import ACTS, Context, Share, Values, inputs_of, mapped, replaced

#: Forward phases that run inside graphs.
INSIDE = ("DRAFT", "EXTEND", "VERIFY")
#: Acts that remember what was before, need what only Python knows, or change a shape; `from_before` has a way of its
#: own here.
OUTSIDE_ONLY = ("frozen", "restart", "target_guess", "narrow", "feature_missing", "squared")


def inside_graphs(mutant: Mutant) -> bool:
    """Whether a mutant can be captured."""
    return (
        mutant.site in ("inputs", "choices", "vocabulary")
        and mutant.act in ACTS
        and mutant.act not in OUTSIDE_ONLY
        and bool(mutant.phases)
        and set(mutant.phases) <= set(INSIDE)
        and mutant.needs != "layers"
    )


@dataclass(slots=True)
class GraphMutants:
    """The mutants of one scheduler process that its graphs hold. `prepare` comes before the first capture."""

    mutants: list[Mutant] = field(default_factory=lambda: [one for one in MUTANTS.values() if inside_graphs(one)])
    #: [m] truth values, [m] counts
    _flags: torch.Tensor | None = None
    _fired: torch.Tensor | None = None
    #: what the rows of the first draft step held one replay earlier, by their shape
    _before: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None

    def __contains__(self, name: str) -> bool:
        return any(mutant.id == name for mutant in self.mutants)

    def prepare(self, device: Any) -> None:
        if self._flags is None:
            self._flags = torch.zeros(len(self.mutants), dtype=torch.bool, device=device)
            self._fired = torch.zeros(len(self.mutants), dtype=torch.int64, device=device)

    def arm(self, names: Iterable[str]) -> None:
        """From here on these act in every replay, and no others."""
        wanted = set(names)
        assert self._flags is not None
        self._flags.copy_(torch.tensor([mutant.id in wanted for mutant in self.mutants]))

    def forget(self) -> None:
        """None is armed, and none has acted."""
        self.arm(())
        assert self._fired is not None
        self._fired.zero_()

    def fired(self) -> dict[str, int]:
        """How many forwards or choices each changed; waits for the device."""
        assert self._fired is not None
        if self._fired.is_cuda:
            torch.cuda.synchronize()  # replays run in a stream of their own
        return dict(zip([mutant.id for mutant in self.mutants], self._fired.tolist(), strict=True))

    def warm(self, forward_batch: Any) -> None:
        """A run before a capture: room for what is remembered, which must not be a graph's own memory."""
        hidden = getattr(forward_batch.spec_info, "hidden_states", None)
        if isinstance(hidden, torch.Tensor) and tuple(hidden.shape) not in self._before:
            self._before[tuple(hidden.shape)] = torch.zeros_like(hidden)

    @contextmanager
    def inputs(
        self, input_ids: Any, positions: Any, forward_batch: Any, *, is_draft: bool, step: int
    ) -> Iterator[tuple[Any, Any]]:
        """The input ids and positions that a captured forward runs with; slots and states change in its batch."""
        phase = phase_inside(forward_batch, is_draft=is_draft)
        values = inputs_of(forward_batch) | {"input_ids": input_ids, "positions": positions}
        shares = shares_of(len(input_ids), int(forward_batch.batch_size))
        made = self._made("inputs", values, phase=phase, step=step, shares=shares)
        with replaced(forward_batch, made):
            yield made.get("input_ids", input_ids), made.get("positions", positions)

    def choices(self, probs: torch.Tensor, ids: torch.Tensor, *, batch: int, step: int) -> tuple[Any, Any]:
        """What a captured choice hands on."""
        values = {"probs": probs, "ids": ids}
        made = values | self._made("choices", values, phase="DRAFT", step=step, shares=shares_of(len(ids), batch))
        return made["probs"], made["ids"]

    def vocabulary(self, worker: Any) -> AbstractContextManager[None]:
        """The map that a captured round's steps look their choices up in."""
        return mapped(worker, partial(self._made, "vocabulary", phase="DRAFT", step=0, shares=[]))

    def _made(self, site: str, values: Values, *, phase: str, step: int, shares: list[Share]) -> Values:
        changed: Values = {}
        for number, mutant in enumerate(self.mutants):
            if mutant.site == site and phase in mutant.phases:
                now = values | changed
                for name, value in self._act(mutant, now, phase=phase, step=step, shares=shares).items():
                    changed[name] = self._chosen(number, sound=now[name], other=value.to(now[name].dtype))
        return changed

    def _act(self, mutant: Mutant, values: Values, *, phase: str, step: int, shares: list[Share]) -> Values:
        if mutant.act == "from_before":
            return self._from_before(mutant, values, step=step)
        context = Context(args=mutant.args, memory={}, phase=phase, step=step, shares=shares, logits=self.logits)
        return ACTS[mutant.act](context, values) if str(mutant.args.get("field", "map")) in values else {}

    def _from_before(self, mutant: Mutant, values: Values, *, step: int) -> Values:
        name = str(mutant.args["field"])
        kept = self._before.get(tuple(values[name].shape)) if name == "hidden" and name in values else None
        if step or kept is None:
            return {}
        old = kept.clone()
        kept.copy_(values[name])
        return {name: old}

    def _chosen(self, number: int, *, sound: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        assert self._flags is not None
        assert self._fired is not None
        self._fired[number].add_((sound != other).any() & self._flags[number])
        return torch.where(self._flags[number], other, sound)


def shares_of(rows: int, batch: int) -> list[Share]:
    """As many rows a request: what a graph was captured for."""
    width = rows // max(1, batch)
    return [Share(str(number), number * width, width) for number in range(batch)]


def phase_inside(forward_batch: Any, *, is_draft: bool) -> str:
    """Of a forward that is captured: the name of its forward mode separates a draft extend from a draft step."""
    if not is_draft:
        return "VERIFY"
    return "EXTEND" if "EXTEND" in getattr(forward_batch.forward_mode, "name", "") else "DRAFT"
