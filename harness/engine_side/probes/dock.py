"""Tensors of a GPU straight into memory of the host: the device copies them in their turn, and nobody waits.

A small copy that is launched through PyTorch costs the scheduler's thread fifty microseconds, a driver call that copies
bytes into pinned memory a few (docs/evidence/gpu.md); a round has a dozen of them. A copy is made in the order of the
current stream, so it holds what the tensor held at that moment.

Everything here runs once or more a round while the scheduler waits, between two stretches of other Python, so every
object made counts: layouts are worked out once, and records are not frozen.

Engine side: standard library, NumPy and torch only. Nothing here may wait for the device but `Arrival.bytes` and
`Dock.bytes`, and nothing may run while a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...both_sides.packed import Field
from .driver import Driver, Moves, pinned
from .snapshot import Copy, name_of

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
    room: int
    used: int = 0


@dataclass(slots=True)
class Arrival:
    """The bytes of a round, there or on their way."""

    blocks: list[Block]
    event: Any
    dock: Dock
    there: bool = False

    def ready(self) -> bool:
        self.there = self.there or self.event is None or bool(self.event.query())
        return self.there

    def bytes(self) -> np.ndarray:
        """uint8 [n]; waits for the device if they are not there yet.

        Ask once, and use them before anything lands again: their blocks, and the event, are used again.
        """
        if self.event is not None:
            if not self.there:
                self.event.synchronize()
            self.dock.spare_events.append(self.event)
        self.dock.spare.extend(self.blocks)
        if len(self.blocks) == 1:
            return self.blocks[0].array[: self.blocks[0].used]
        parts = [block.array[: block.used] for block in self.blocks]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)


@dataclass(slots=True)
class _Layout:
    """Where tensors of certain dtypes and shapes lie, one after the other; places: (first byte, bytes) of each."""

    fields: tuple[Field, ...]
    places: list[tuple[int, int]]
    whole: int


class Dock:
    """Where the bytes of the round in progress land. Nothing given: through the driver of a GPU.

    move: copies (to, from, bytes) in a stream; event: recorded now, given one that may be used again or None; new:
    memory of the host; wait: for the device; stream: the current one's handle.
    """

    def __init__(
        self,
        *,
        move: Callable[[Moves, int], None] | None = None,
        event: Callable[[Any], Any] | None = None,
        new: Callable[[int], torch.Tensor] | None = None,
        wait: Callable[[], None] | None = None,
        stream: Callable[[], int] = lambda: 0,
    ) -> None:
        driver = Driver() if move is None else None
        #: how copies are launched, for the handshake
        self.batches = "" if driver is None else driver.batches
        self._move: Callable[[Moves, int], None] = driver.move if driver is not None else move  # type: ignore[assignment]
        self._event: Callable[[Any], Any] = event or (driver.event if driver is not None else lambda _used: None)
        self._new = new or pinned
        self._wait_for_device = wait or (lambda: torch.cuda.current_stream().synchronize())
        self._stream = stream if driver is None else driver.stream
        self.spare: list[Block] = []
        self.spare_events: list[Any] = []
        self._blocks: list[Block] = []
        #: bytes of the round in the blocks before the last
        self._before = 0
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        #: copies that wait for the next ones, and the stream they belong to
        self._later: list[tuple[int, int, int]] = []
        self._later_in = 0

    def forget(self) -> None:
        """Arrangements of the scenario before: prompts of other lengths have others."""
        self._layouts = {}

    def copied(self, tensors: dict[str, torch.Tensor | None]) -> Copy | None:
        """One copy of those that are there, in their own dtypes; None if there is none."""
        given, key = [], list[Any]()
        for name, tensor in tensors.items():
            if tensor is not None:
                given.append(tensor if tensor.is_contiguous() else tensor.contiguous())
                key += (name, tensor.dtype, tensor.shape)
        if not given:
            return None
        kind = tuple(key)
        layout = self._layouts.get(kind)
        if layout is None:
            layout = self._layouts[kind] = _laid_out(kind)
        block, start, base = self._room(layout.whole)
        address = block.address + start
        moves = []
        for tensor, (place, count) in zip(given, layout.places):  # noqa: B905 - as many by the key, and it costs
            if tensor.is_cuda:
                if count:
                    moves.append((address + place, tensor.data_ptr(), count))
            else:  # some releases hold a list of numbers on the host where others have a tensor
                memmove(address + place, tensor.data_ptr(), count)
        if moves:  # now, while what `contiguous` made is there
            self._launch(moves)
        return Copy((self, block, start, layout.whole), layout.fields, base)

    def land(self, data: torch.Tensor, *, later: bool = False) -> int:
        """Where the bytes of a contiguous tensor, as they are now, begin in the round's bytes.

        later: nobody writes to it before the next `settle`, and nobody gives its memory to others, so the copy may be
        launched together with the next.
        """
        count = data.nbytes
        block, start, base = self._room(-(-count // ALIGNED) * ALIGNED)
        if not data.is_cuda:
            memmove(block.address + start, data.data_ptr(), count)
        elif later:
            stream = self._stream()
            if self._later and stream != self._later_in:
                self.settle()
            self._later.append((block.address + start, data.data_ptr(), count))
            self._later_in = stream
        elif count:
            self._launch([(block.address + start, data.data_ptr(), count)])
        return base

    def bytes(self, block: Block, start: int, size: int) -> np.ndarray:
        """uint8 [size] of what a `Copy` landed; waits for the device."""
        self.settle()
        self._wait_for_device()
        return block.array[start : start + size]

    def settle(self) -> None:
        """Launch what waits: what it is copied from may be written to from here on."""
        if self._later:
            moves, self._later = self._later, []
            self._move(moves, self._later_in)

    def _launch(self, moves: list[tuple[int, int, int]]) -> None:
        stream = self._stream()
        if self._later:
            if stream == self._later_in:
                moves, self._later = self._later + moves, []
            else:
                self.settle()
        self._move(moves, stream)

    def _room(self, whole: int) -> tuple[Block, int, int]:
        """A block, the place in it, and the place in the round's bytes, for so many bytes, which ALIGNED divides."""
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.used + whole > block.room:
            self._before += 0 if block is None else block.used
            block = self._block(whole)
            self._blocks.append(block)
        start = block.used
        block.used = start + whole
        return block, start, self._before + start

    def _block(self, size: int) -> Block:
        for place, spare in enumerate(self.spare):
            if spare.room >= size:
                found = self.spare.pop(place)
                found.used = 0
                return found
        host = self._new(max(BLOCK_BYTES, 1 << size.bit_length()))
        return Block(host, host.numpy(), host.data_ptr(), host.numel())

    def leave(self) -> Arrival:
        """The round is over: what landed since the last time."""
        self.settle()
        blocks, self._blocks, self._before = self._blocks, [], 0
        if not blocks:
            return Arrival(blocks, None, self)
        return Arrival(blocks, self._event(self.spare_events.pop() if self.spare_events else None), self)

    def abandon(self) -> None:
        """The round failed: its blocks may still be written to, so they are not used again."""
        self._blocks, self._before, self._later = [], 0, []


def _laid_out(kind: tuple[Any, ...]) -> _Layout:
    """kind: name, dtype and shape of each, one after the other."""
    fields: list[Field] = []
    places, size = [], 0
    for name, dtype, shape in zip(kind[0::3], kind[1::3], kind[2::3], strict=True):
        count = shape.numel() * dtype.itemsize
        fields.append((name, name_of(dtype), size, tuple(shape)))
        places.append((size, count))
        size += -(-count // ALIGNED) * ALIGNED
    return _Layout(tuple(fields), places, size)
