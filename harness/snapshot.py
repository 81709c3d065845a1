"""Copies of tensors as they are now, and their way off the device: one transfer a round, and nobody waits for it.

Engine side: standard library, NumPy and torch only. Nothing here may wait for the device but `Shipment.bytes` and
`Copy.read`; everything else may run while a CUDA graph is captured, except `Shipper`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import packed
from .packed import Arrays, Field

TOP_LOGITS = 16  # same number as harness.trace.TOP_LOGITS; this side must not import it

_HALVES = (torch.float16, torch.bfloat16)
_NAMES: dict[torch.dtype, str] = {}


@dataclass(frozen=True, slots=True)
class Copy:
    """Some tensors' values at one moment, as bytes on their own device; fields say which is where."""

    data: torch.Tensor
    fields: tuple[Field, ...]

    def read(self) -> Arrays:
        """The values; waits for the device."""
        return packed.read(self.data.cpu().numpy(), [(0, self.fields)])


def copied(tensors: dict[str, torch.Tensor | None]) -> Copy | None:
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


def inputs_of(input_ids: Any, positions: Any, forward_batch: Any, *, is_draft: bool) -> Copy | None:
    """What goes into a forward, as it is now: positions are advanced in place afterwards."""
    hidden = getattr(forward_batch.spec_info, "hidden_states", None) if is_draft else None
    kept = hidden if isinstance(hidden, torch.Tensor) and hidden.numel() else None
    found = {"input_ids": input_ids, "positions": positions, "cache_slots": forward_batch.out_cache_loc}
    return copied({**found, "hidden_in": kept})


def outputs_of(output: Any) -> Copy | None:
    """What a forward says, of a LogitsProcessorOutput: hidden rows, top logits with their ids, log-sum-exp."""
    logits, hidden = output.next_token_logits, output.hidden_states
    found: dict[str, torch.Tensor | None] = {"hidden_out": hidden}
    if logits is not None:
        logits = logits.detach()
        values, ids = torch.topk(logits, min(TOP_LOGITS, logits.shape[-1]), dim=-1)
        # Of equal logits, topk lists any first; SGLang chooses by argmax.
        found |= {
            "best": torch.argmax(logits, dim=-1),
            "top_ids": ids,
            "top_logits": values,
            **_normalizer(logits, ids),
        }
    return copied(found)


def _normalizer(logits: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the log-sum-exp is read from: for halves one kernel that also widens them, in place of nine."""
    if logits.dtype in _HALVES:
        return {"log_prob": torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids[:, :1])}
    return {"lse": torch.logsumexp(logits.float(), dim=-1)}


class Shipper:
    """Sends the bytes of a round to the host; on a GPU into pinned memory, which is used again once it was read."""

    def __init__(self) -> None:
        self._spare: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def ship(self, parts: list[torch.Tensor]) -> Shipment:
        """parts: uint8 tensors of one device."""
        if not parts:
            return Shipment(torch.empty(0, dtype=torch.uint8), None)
        whole = _together(parts) if len(parts) > 1 else parts[0]
        if whole.device.type == "cpu":
            return Shipment(whole, None)
        size = whole.numel()
        spare, event = self._room(size)
        host = spare[:size]
        host.copy_(whole, non_blocking=True)
        event.record()
        return Shipment(host, event, lambda: self._spare.append((spare, event)))

    def _room(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        for place, (spare, _event) in enumerate(self._spare):
            if spare.numel() >= size:
                return self._spare.pop(place)
        rounded = 1 << max(16, (size - 1).bit_length())
        return torch.empty(rounded, dtype=torch.uint8, device="cpu", pin_memory=True), torch.cuda.Event()


@dataclass(frozen=True, slots=True)
class Shipment:
    """Bytes on their way to the host, or there."""

    host: torch.Tensor
    event: torch.cuda.Event | None
    done: Any = None

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def bytes(self) -> np.ndarray:
        """uint8 [n]; waits for the device if they are not there yet. Ask once: their place is used again."""
        if self.event is None:
            return self.host.numpy()
        self.event.synchronize()
        found = self.host.numpy().copy()
        self.done()
        return found
