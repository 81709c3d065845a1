"""What mutants make a rank without requests do in a forward: leave it out, or go in with something it should not have.

Engine side: torch only. The probe sees what they do, as it sees everything that goes into a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Forwards left out, by the acts that leave them out: a rank gives the last one's output again.
SKIPS = ("skip_forward",)
#: Changes of what goes in.
CHANGES = ("other_width", "kept_state", "counts_exchanged")
IDLE_ACTS = (*SKIPS, *CHANGES)


class Memory:
    """What the last busy forward of a phase carried, for a rank that keeps it."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}

    def keep(self, phase: str, forward_batch: Any) -> None:
        hidden = getattr(forward_batch.spec_info, "hidden_states", None)
        if isinstance(hidden, torch.Tensor) and len(hidden):
            self.states[phase] = hidden.clone()


@contextmanager
def changed(act: str, forward_batch: Any, *, args: Any, kept: torch.Tensor | None) -> Iterator[bool]:
    """The forward batch of an idle rank as `act` makes it; whether anything became different."""
    owner, name, value = _change(act, forward_batch, args=args, kept=kept)
    if value is None:
        yield False
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield True
    finally:
        setattr(owner, name, before)


def _change(act: str, forward_batch: Any, *, args: Any, kept: torch.Tensor | None) -> tuple[Any, str, Any]:
    makers: dict[str, Callable[[], Any]] = {
        "other_width": lambda: _narrower(forward_batch, int(args.get("parts", 1))),
        "kept_state": lambda: kept,
        "counts_exchanged": lambda: _exchanged(forward_batch),
    }
    if act == "counts_exchanged":
        return forward_batch, "global_num_tokens_cpu", makers[act]()
    return forward_batch.spec_info, "hidden_states", makers[act]()


def _narrower(forward_batch: Any, parts: int) -> torch.Tensor | None:
    """No rows, as wide as one of `parts` features."""
    hidden = getattr(forward_batch.spec_info, "hidden_states", None)
    if not isinstance(hidden, torch.Tensor):
        return None
    return hidden.new_empty((0, hidden.shape[-1] // parts))


def _exchanged(forward_batch: Any) -> list[int] | None:
    counts = forward_batch.global_num_tokens_cpu
    return None if counts is None or len(set(counts)) < 2 else list(reversed(counts))
