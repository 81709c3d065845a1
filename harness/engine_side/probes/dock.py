"""Tensors of a GPU straight into memory of the host: the device copies them in their turn, and nobody waits.

A small copy that is launched through PyTorch costs the scheduler's thread fifty microseconds, a driver call that copies
bytes into pinned memory a few (docs/evidence/gpu.md); a round has a dozen of them. A copy is made in the order of the
current stream, so it holds what the tensor held at that moment.

Engine side: standard library, NumPy and torch only. Nothing here may wait for the device but `Arrival.bytes` and
`Landing.bytes`, and nothing may run while a CUDA graph is captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...both_sides.packed import Field
from .snapshot import Copy, name_of

#: Copies `count` bytes from an address of the device to one of the host, in the current stream: (to, from, count).
Move = Callable[[int, int, int], None]

#: Bytes of a block at first: a round of a small model; wider ones get more or larger blocks.
BLOCK_BYTES = 1 << 18
#: Everything begins at a multiple of this.
ALIGNED = 8


@dataclass(slots=True)
class Block:
    """Memory of the host; address: of its first byte."""

    host: torch.Tensor
    array: np.ndarray
    address: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class Landing:
    """Some bytes on their way into a block. base: where they begin in the round's bytes."""

    block: Block
    start: int
    size: int
    base: int
    wait: Callable[[], None]

    def bytes(self) -> np.ndarray:
        """uint8 [size]; waits for the device."""
        self.wait()
        return self.block.array[self.start : self.start + self.size]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The bytes of a round, there or on their way."""

    blocks: list[Block]
    event: Any
    spare: list[Block]

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def bytes(self) -> np.ndarray:
        """uint8 [n]; waits for the device if they are not there yet. Ask once: their blocks are used again."""
        if self.event is not None:
            self.event.synchronize()
        parts = [block.array[: block.used] for block in self.blocks]
        found = np.concatenate(parts) if parts else np.empty(0, np.uint8)  # a copy, also of a single one
        self.spare.extend(self.blocks)
        return found


@dataclass(slots=True)
class Dock:
    """Where the bytes of the round in progress land. Nothing given: with move, event, new and wait of a GPU."""

    move: Move = field(default_factory=lambda: driver_copy())
    event: Callable[[], Any] = lambda: _recorded_event()
    new: Callable[[int], torch.Tensor] = lambda size: _pinned(size)
    wait: Callable[[], None] = lambda: torch.cuda.current_stream().synchronize()
    _blocks: list[Block] = field(default_factory=list)
    _spare: list[Block] = field(default_factory=list)
    #: bytes of the round in the blocks before the last
    _before: int = 0

    def copied(self, tensors: dict[str, torch.Tensor | None]) -> Copy | None:
        """One copy of those that are there, in their own dtypes; None if there is none."""
        given = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        if not given:
            return None
        fields: list[Field] = []
        sizes, size = [], 0
        for name, tensor in given.items():
            count = tensor.numel() * tensor.element_size()
            fields.append((name, name_of(tensor.dtype), size, tuple(tensor.shape)))
            sizes.append((size, count))
            size += -(-count // ALIGNED) * ALIGNED
        landing = self._room(size)
        address = landing.block.address + landing.start
        for tensor, (start, count) in zip(given.values(), sizes, strict=True):
            self._land(tensor, address + start, count)
        return Copy(landing, tuple(fields))

    def land(self, data: torch.Tensor) -> Landing:
        """The bytes of a contiguous tensor as they are now."""
        count = data.numel() * data.element_size()
        landing = self._room(count)
        self._land(data, landing.block.address + landing.start, count)
        return landing

    def _land(self, tensor: torch.Tensor, address: int, count: int) -> None:
        if not count:
            return
        if tensor.is_cuda:
            self.move(address, tensor.data_ptr(), count)
        else:  # some releases hold a list of numbers on the host where others have a tensor
            ctypes.memmove(address, tensor.data_ptr(), count)

    def _room(self, size: int) -> Landing:
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.used + size > len(block.array):
            self._before += 0 if block is None else block.used
            block = self._block(size)
            self._blocks.append(block)
        start, block.used = block.used, block.used + -(-size // ALIGNED) * ALIGNED
        return Landing(block, start, size, self._before + start, self.wait)

    def _block(self, size: int) -> Block:
        for place, spare in enumerate(self._spare):
            if len(spare.array) >= size + ALIGNED:
                found = self._spare.pop(place)
                found.used = 0
                return found
        host = self.new(max(BLOCK_BYTES, 1 << (size + ALIGNED).bit_length()))
        return Block(host, host.numpy(), host.data_ptr())

    def leave(self) -> Arrival:
        """The round is over: what landed since the last time."""
        blocks, self._blocks, self._before = self._blocks, [], 0
        return Arrival(blocks, self.event() if blocks else None, self._spare)

    def abandon(self) -> None:
        """The round failed: its blocks may still be written to, so they are not used again."""
        self._blocks, self._before = [], 0


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _recorded_event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


def driver_copy() -> Move:
    """`cuMemcpyDtoHAsync` of the driver, in PyTorch's current stream; RuntimeError with the driver's number."""
    call = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoHAsync_v2
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    call.restype = ctypes.c_int
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    device = torch.cuda.current_device()

    def stream() -> int:
        return int(torch.cuda.current_stream().cuda_stream if quick is None else quick(device))

    def move(to: int, origin: int, count: int) -> None:
        error = call(to, origin, count, stream())
        if error:
            raise RuntimeError(f"CUDA error: the driver would not copy {count} bytes to the host ({error})")

    return move
