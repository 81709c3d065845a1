"""What one CUDA graph does, call by call, and the memory its copies are in.

Engine side: standard library and torch only. `put` and `close` run inside a capture, so nothing here may synchronise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from ...both_sides.wire import Field
from .snapshot import Copy

#: What all graphs of a tiny pair fill a twentieth of.
ARENA_BYTES = 1 << 25
#: Of where each buffer begins: what a copy likes.
ALIGNED = 256


@dataclass(frozen=True, slots=True)
class Call:
    """One thing that happens inside a graph: a 'forward' of a model, or what was 'chosen' from the one before.

    is_draft: whose model; batch: requests the graph was captured for, padding included; fields: where its tensors lie
    in the graph's buffer.
    """

    what: str
    is_draft: bool
    batch: int
    fields: tuple[Field, ...]


@dataclass
class CapturedGraph:
    """What one graph does, in order, and the buffer its copies are in: uint8 [n], filled again by every replay.

    lasting: nothing but this graph writes to the buffer. Else it holds until the next replay of any graph, since graphs
    share a pool of memory, which is given to nothing but captures.
    """

    calls: list[Call] = field(default_factory=list)
    buffer: torch.Tensor | None = None
    lasting: bool = False
    #: the `round.Round` that keeps the buffer as it is until its end
    kept: object = None
    #: forwards that follow each other: (whether the draft's, batch, how many)
    runs: list[tuple[bool, int, int]] = field(default_factory=list)
    _parts: list[torch.Tensor] = field(default_factory=list)
    _size: int = 0

    @property
    def forwards(self) -> int:
        """How many forwards it has so far."""
        return sum(call.what == "forward" for call in self.calls)

    def put(self, what: str, *, is_draft: bool, batch: int, copies: Sequence[Copy | None]) -> None:
        """Keep copies that were made at this place of the graph, in the order of the calls."""
        fields = []
        for copy in copies:
            if copy is not None:
                fields += [(name, kind, self._size + start, shape) for name, kind, start, shape in copy.fields]
                self._parts.append(copy.data)
                self._size += copy.data.numel()
        self.calls.append(Call(what, is_draft, batch, tuple(fields)))

    def close(self, arena: Arena | None = None) -> None:
        """Pack everything into one buffer; still inside the capture, so the packing is replayed too."""
        forwards = [(call.is_draft, call.batch) for call in self.calls if call.what == "forward"]
        self.runs = [(*kind, len(list(same))) for kind, same in groupby(forwards)]
        if self._parts:
            place = None if arena is None else arena.give(self._size)
            self.buffer, self.lasting = torch.cat(self._parts, out=place), place is not None
        self._parts = []


class Arena:
    """Memory of a device that no pool of graphs gives to anybody else, so that what is put there may wait."""

    def __init__(self, device: str) -> None:
        """Call outside of any capture."""
        self._whole = torch.empty(ARENA_BYTES, dtype=torch.uint8, device=device)
        self._used = 0

    def give(self, size: int) -> torch.Tensor | None:
        """uint8 [size]; None if there is not so much left."""
        start, end = self._used, self._used + size
        if end > ARENA_BYTES:
            return None
        self._used = -(-end // ALIGNED) * ALIGNED
        return self._whole[start:end]
