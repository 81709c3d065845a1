"""Pinned staging buffer: tensors of a GPU straight into memory of the host, in the order of the stream; nobody waits.

A small copy that is launched through PyTorch costs the scheduler's thread fifty microseconds, a driver call that copies
bytes into pinned memory a few (docs/evidence/gpu.md); a round has a dozen of them. A copy is made in the order of the
current stream, so it holds what the tensor held at that moment.

What nobody writes to before the round is over is not copied at once: its reference is kept, and one call copies all of
it at the end. Working on cold caches, between two stretches of other Python, is what a round's copies cost most, so
what is done at each place is as little as can be: layouts are worked out once, and records are not frozen.

Engine side: standard library, NumPy and torch only. Nothing here may wait for the device but `StagedRound.bytes` and
`StagingBuffer.bytes`, and nothing may run while a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...both_sides.wire import Field
from .driver import Driver, Moves, pinned
from .snapshot import Copy, Tensors, name_of

#: Bytes of a block at first: a round of four requests of an 8B model with an EAGLE-3 head is 0.9 MB. What needs more
#: gets more or larger blocks, which are put together by a copy.
BLOCK_BYTES = 1 << 20
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
class StagedRound:
    """The bytes of a round, there or on their way."""

    blocks: list[Block]
    events: list[Any]
    buffer: StagingBuffer
    there: bool = False

    def ready(self) -> bool:
        self.there = self.there or all(event.query() for event in self.events)
        return self.there

    def bytes(self) -> np.ndarray:
        """uint8 [n]; waits for the device if they are not there yet.

        Ask once, and use them before anything is staged again: their blocks, and the events, are used again.
        """
        for event in self.events:
            if not self.there:
                event.synchronize()
            self.buffer.spare_events.append(event)
        self.buffer.spare.extend(self.blocks)
        if len(self.blocks) == 1:
            return self.blocks[0].array[: self.blocks[0].used]
        parts = [block.array[: block.used] for block in self.blocks]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)


@dataclass(slots=True)
class _Layout:
    """Where tensors of certain dtypes and shapes lie, one after the other.

    groups: of tensors that belong together, their fields, where they begin and how many bytes they take. places: (first
    byte, bytes) of each tensor.
    """

    groups: list[tuple[tuple[Field, ...], int, int]]
    places: list[tuple[int, int]]
    whole: int


class StagingBuffer:
    """Where the bytes of the round in progress are staged. Nothing given: through the driver of a GPU.

    move: copies (to, from, bytes) in a stream; event: recorded now in that stream, given one that may be used again or
    None; new: memory of the host; wait: for the device; stream: the current one's handle.
    """

    def __init__(
        self,
        *,
        move: Callable[[Moves, int], None] | None = None,
        event: Callable[[Any, int], Any] | None = None,
        new: Callable[[int], torch.Tensor] | None = None,
        wait: Callable[[], None] | None = None,
        stream: Callable[[], int] = lambda: 0,
    ) -> None:
        driver = Driver() if move is None else None
        #: how copies are launched, for the handshake
        self.batches = "" if driver is None else driver.batches
        self._move: Callable[[Moves, int], None] = driver.move if driver is not None else move  # type: ignore[assignment]
        self._event: Callable[[Any, int], Any] | None = event or (driver.event if driver is not None else None)
        self._new = new or pinned
        self._wait_for_device = wait or torch.cuda.synchronize
        self._stream = stream if driver is None else driver.stream
        self.spare: list[Block] = []
        self.spare_events: list[Any] = []
        self._blocks: list[Block] = []
        #: bytes of the round in the blocks before the last
        self._before = 0
        self._layouts: dict[tuple[Any, ...], _Layout] = {}
        #: copies to be made once the round is over with their tensors, and how often those had been written to
        self._held: list[tuple[Copy, Tensors]] = []
        self._versions: list[list[int | None]] = []
        #: launched with them
        self._later: list[tuple[int, int, int]] = []
        self._waits_in = 0
        #: streams that this round's copies were launched in
        self._streams: list[int] = []

    def forget_layouts(self) -> None:
        """Arrangements of the scenario before: prompts of other lengths have others."""
        self._layouts = {}

    # -- copies --

    def copied(self, tensors: Tensors) -> Copy | None:
        """One copy of those that are there, as they are now, in their own dtypes; None if there is none."""
        copy = Copy((self,), ())
        return copy if self._put([(copy, tensors)], [], self._stream()) else None

    def held(self, tensors: Tensors) -> Copy:
        """As `copied`, for tensors that nobody writes to before the round is over: copied with everything else then.

        Every round checks PyTorch's count of writes, so that a wrong belief ends the run instead of recording values of
        another moment. Where PyTorch counts none, they are copied at once.
        """
        copy = Copy((self,), ())
        try:
            versions = [None if tensor is None else tensor._version for tensor in tensors.values()]
        except RuntimeError:  # tensors of inference mode
            self._put([(copy, tensors)], [], self._stream())
            return copy
        if not (self._held or self._later):
            self._waits_in = self._stream()
        self._held.append((copy, tensors))
        self._versions.append(versions)
        return copy

    def stage(self, data: torch.Tensor) -> int:
        """Where the bytes of a contiguous tensor, as they are now, begin in the round's bytes."""
        count = data.nbytes
        block, start, base = self._room(-(-count // ALIGNED) * ALIGNED)
        if data.is_cuda:
            self._launch([(block.address + start, data.data_ptr(), count)] if count else [], self._stream())
        else:
            memmove(block.address + start, data.data_ptr(), count)
        return base

    def stage_later(self, data: torch.Tensor) -> int:
        """As `stage`, for a buffer of a graph that nothing writes to but that graph: copied when the round is over."""
        if not data.is_cuda:
            return self.stage(data)
        count = data.nbytes
        block, start, base = self._room(-(-count // ALIGNED) * ALIGNED)
        if not (self._held or self._later):
            self._waits_in = self._stream()
        self._later.append((block.address + start, data.data_ptr(), count))
        return base

    def stage_held(self) -> None:
        """Launch what waits for the end of the round."""
        held, later, versions = self._held, self._later, self._versions
        if not (held or later):
            return
        self._held, self._later, self._versions = [], [], []
        for (_, tensors), before in zip(held, versions):  # noqa: B905 - as many, and it costs
            if before != [None if tensor is None else tensor._version for tensor in tensors.values()]:
                names = ", ".join(tensors)
                raise RuntimeError(f"one of {names} was written to before the round was over, and is copied only then")
        stream = self._stream()
        if stream != self._waits_in:  # no order between the two
            self._wait_for_device()
        self._put(held, later, stream)

    def bytes(self, copy: Copy) -> np.ndarray:
        """uint8 [n] of what a `Copy` staged; waits for the device."""
        if len(copy.data) == 1:
            self.stage_held()
        self._wait_for_device()
        _, block, start, size = copy.data
        found: np.ndarray = block.array[start : start + size]
        return found

    def _put(self, groups: list[tuple[Copy, Tensors]], moves: list[tuple[int, int, int]], stream: int) -> bool:
        """Copy all of them to a place of their own, and make these moves; whether there was any tensor."""
        given, key = list[torch.Tensor](), list[Any]()
        for _, tensors in groups:
            key.append(None)
            for name, tensor in tensors.items():
                if tensor is not None:
                    given.append(tensor if tensor.is_contiguous() else tensor.contiguous())
                    key += (name, tensor.dtype, tensor.shape)
        if given:
            kind = tuple(key)
            layout = self._layouts.get(kind)
            if layout is None:
                layout = self._layouts[kind] = _laid_out(key)
            block, start, base = self._room(layout.whole)
            for (copy, _), (fields, first, size) in zip(groups, layout.groups):  # noqa: B905 - as many by the key
                copy.data, copy.fields, copy.base = (self, block, start + first, size), fields, base + first
            address = block.address + start
            for tensor, (place, count) in zip(given, layout.places):  # noqa: B905
                if not tensor.is_cuda:  # some releases hold a list of numbers on the host where others have a tensor
                    memmove(address + place, tensor.data_ptr(), count)
                elif count:
                    moves.append((address + place, tensor.data_ptr(), count))
        self._launch(moves, stream)  # now, while what `contiguous` made is there
        return bool(given)

    def _launch(self, moves: Moves, stream: int) -> None:
        if moves:
            if stream not in self._streams:
                self._streams.append(stream)
            self._move(moves, stream)

    # -- memory --

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

    # -- the end of a round --

    def close_round(self) -> StagedRound:
        """The round is over: what was staged since the last time."""
        self.stage_held()
        blocks, self._blocks, self._before = self._blocks, [], 0
        streams, self._streams = self._streams, []
        events, spare = [], self.spare_events
        if self._event is not None:
            events = [self._event(spare.pop() if spare else None, stream) for stream in streams]
        return StagedRound(blocks, events, self)

    def drop_round(self) -> None:
        """The round failed: its blocks may still be written to, so they are not used again."""
        self._blocks, self._before, self._streams = [], 0, []
        self._held, self._later, self._versions = [], [], []


def _laid_out(key: list[Any]) -> _Layout:
    """key: None before each group, then name, dtype and shape of each of its tensors."""
    groups, places, size = list[tuple[tuple[Field, ...], int, int]](), list[tuple[int, int]](), 0
    starts = [at for at, what in enumerate(key) if what is None]
    for at, end in zip(starts, [*starts[1:], len(key)], strict=True):
        first, fields = size, list[Field]()
        for name, dtype, shape in zip(*(key[at + 1 + part : end : 3] for part in range(3)), strict=True):
            count = shape.numel() * dtype.itemsize
            fields.append((name, name_of(dtype), size - first, tuple(shape)))
            places.append((size, count))
            size += -(-count // ALIGNED) * ALIGNED
        groups.append((tuple(fields), first, size - first))
    return _Layout(groups, places, size)
