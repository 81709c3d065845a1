"""Copies of tensors as they are now, which of them show a forward, and a round's bytes where there is no GPU.

Engine side: standard library, NumPy and torch only. Nothing here may wait for the device but `Copy.read`; everything
else may run while a CUDA graph is captured, except `HostRound`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...both_sides import wire
from ...both_sides.projections import TOP_LOGITS
from ...both_sides.wire import Arrays, Field

#: What is to be copied, by name; None where there is nothing.
Tensors = dict[str, torch.Tensor | None]

_HALVES = (torch.float16, torch.bfloat16)
_NAMES: dict[torch.dtype, str] = {}


@dataclass(slots=True)  # not frozen: a dozen are made a round, while the scheduler waits
class Copy:
    """Some tensors' values at one moment; fields say which is where.

    data: uint8 [n] on the tensors' own device; or, of what is staged, the buffer, and where it holds them once it does.
    base: where they begin in the round's bytes then, else -1. fields: empty as long as it waits to be staged.
    """

    data: Any
    fields: tuple[Field, ...]
    base: int = -1

    def read(self) -> Arrays:
        """The values; waits for the device."""
        if isinstance(self.data, torch.Tensor):
            return wire.read(self.data.cpu().numpy(), [(0, self.fields)])
        found = self.data[0].bytes(self)
        return wire.read(found, [(0, self.fields)])


def copied(tensors: Tensors) -> Copy | None:
    """One copy of those that are there, in their own dtypes, with one launch on the device; None if there is none."""
    parts, fields, size = [], [], 0
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        part = _flat(tensor)
        fields.append((name, name_of(tensor.dtype), size, tuple(tensor.shape)))
        size += part.numel()
        parts.append(part)
    return Copy(_together(parts), tuple(fields)) if parts else None


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """A new tensor of all the bytes."""
    try:
        return torch.cat(parts)
    except RuntimeError:
        places = {part.device for part in parts}
        if len(places) == 1:
            raise
        # some releases hold a list of numbers on the host where others have a tensor
        place = next(place for place in places if place.type != "cpu")
        return torch.cat([part.to(place) for part in parts])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its indices."""
    row = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    if row.stride(0) != 1:  # also a single element, which is contiguous whatever its stride says
        row = row.clone(memory_format=torch.contiguous_format)
    return row.view(torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def inputs_of(input_ids: Any, positions: Any, forward_batch: Any, *, is_draft: bool) -> Tensors:
    """What goes into a forward. To be copied before it runs: positions are advanced in place afterwards."""
    hidden = getattr(forward_batch.spec_info, "hidden_states", None) if is_draft else None
    kept = hidden if isinstance(hidden, torch.Tensor) and hidden.numel() else None
    slots = forward_batch.out_cache_loc
    return {"input_ids": input_ids, "positions": positions, "cache_slots": slots, "hidden_in": kept}


def outputs_of(output: Any, *, whole_below: int = 0) -> Tensors:
    """What a forward says, of a LogitsProcessorOutput: hidden rows, top logits with their ids, log-sum-exp.

    whole_below: with a vocabulary smaller than this, all logits instead, and the control side works the rest out.
    """
    # What is no tensor holds nothing, and SGLang stumbles over it itself.
    said = (getattr(output, name, None) for name in ("next_token_logits", "hidden_states"))
    logits, hidden = (one if isinstance(one, torch.Tensor) else None for one in said)
    found: Tensors = {"hidden_out": hidden}
    if logits is not None and logits.shape[-1] < whole_below:
        found["logits"] = logits
    elif logits is not None:
        logits = logits.detach()
        values, ids = torch.topk(logits, min(TOP_LOGITS, logits.shape[-1]), dim=-1)
        # Of equal logits, topk lists any first; SGLang chooses by argmax.
        found |= {
            "best": torch.argmax(logits, dim=-1),
            "top_ids": ids,
            "top_logits": values,
            **_normalizer(logits, ids),
        }
    return found


def _normalizer(logits: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the log-sum-exp is read from: for halves one kernel that also widens them, in place of nine."""
    if logits.dtype in _HALVES:
        return {"log_prob": torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids[:, :1])}
    return {"lse": torch.logsumexp(logits.float(), dim=-1)}


@dataclass(frozen=True, slots=True)
class HostRound:
    """The bytes of a round where the engine runs on the host (see `staging` for a GPU): they are there."""

    parts: list[torch.Tensor]

    def ready(self) -> bool:
        return True

    def bytes(self) -> np.ndarray:
        """uint8 [n]."""
        found: np.ndarray = (_together(self.parts) if self.parts else torch.empty(0, dtype=torch.uint8)).numpy()
        return found
