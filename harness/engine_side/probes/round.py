"""A round while it runs: its requests, what happened in it, and where the tensors that show it lie in its bytes.

Engine side: standard library and torch only. It must copy and never modify a tensor it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...both_sides.wire import Field
from .captured_graph import CapturedGraph
from .snapshot import Copy
from .staging import StagingBuffer

#: What happens inside a graph: (what, whether the draft does it, batch it was captured for, number of its layout) each.
Table = list[tuple[str, bool, int, int]]


class Layouts:
    """Arrangements of fields, and what happens inside a graph, by number, so that each travels once a scenario."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Field, ...], int] = {}
        #: numbers by identity of the keys above, which live as long: a tuple of tuples is slow to look up by its value
        self._same: dict[int, int] = {}
        self._unsent: list[tuple[Field, ...]] = []
        self._tables: dict[int, tuple[int, Any]] = {}
        self._unsent_tables: list[Table] = []

    def number(self, fields: tuple[Field, ...]) -> int:
        found = self._same.get(id(fields))
        if found is None:
            found = self._numbers.get(fields)
        if found is None:
            found = self._numbers[fields] = self._same[id(fields)] = len(self._numbers)
            self._unsent.append(fields)
        return found

    def table(self, captured: CapturedGraph) -> int:
        """The number of a graph's table of calls; the record is kept, so that no other takes its place."""
        found = self._tables.get(id(captured))
        if found is None:
            found = self._tables[id(captured)] = len(self._tables), captured
            self._unsent_tables.append(
                [(call.what, call.is_draft, call.batch, self.number(call.fields)) for call in captured.calls]
            )
        return found[0]

    def news(self) -> tuple[list[tuple[Field, ...]], list[Table]]:
        """Arrangements and tables that were not asked for before, in the order of their numbers.

        The lists are the caller's from here on: rounds stay underway while later ones ask for more.
        """
        unsent, tables = self._unsent, self._unsent_tables
        self._unsent, self._unsent_tables = [], []
        return unsent, tables


def _numbers(copy: Copy, name: str) -> list[int]:
    found: list[int] = copy.read()[name].reshape(-1).tolist()
    return found


@dataclass(slots=True)
class Round:
    """The batch being run: one entry a request, in batch order.

    starts and accept_lens may still be on the device; asking for them here waits for it, and only mutants ask.
    """

    index: int
    scheduler_step: int
    mode: str
    rids: list[str]
    given_starts: list[int] | Copy
    lens: list[int]
    final: list[bool]
    attempts: list[int]
    forwards: dict[str, int] = field(default_factory=dict)
    num_steps: int = -1  # where they change from round to round
    graphs: dict[str, int] = field(default_factory=dict)  # phase -> batch size of the CUDA graph that ran it
    accepted: list[int] | Copy = field(default_factory=list)
    extend_rids: list[int] = field(default_factory=list)  # batch rows that take part in the draft-extend
    events: list[dict[str, Any]] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)
    size: int = 0
    #: copies that were not staged yet when they were held, and the pieces that wait for their places
    waiting: list[tuple[list[tuple[int, int]], Copy]] = field(default_factory=list)
    layouts: Layouts = field(default_factory=lambda: Layouts())
    staging: StagingBuffer | None = None

    @property
    def starts(self) -> list[int]:
        if isinstance(self.given_starts, Copy):
            self.given_starts = _numbers(self.given_starts, "starts")
        return self.given_starts

    @property
    def accept_lens(self) -> list[int]:
        if isinstance(self.accepted, Copy):
            self.accepted = _numbers(self.accepted, "lens")
        return self.accepted

    def hold(self, copies: Sequence[Copy | None]) -> list[tuple[int, int]]:
        """Take copies along; where each begins in the round's bytes, and the number of its layout.

        Those that are not staged yet follow when the round is closed (`staged`).
        """
        pieces: list[tuple[int, int]] = []
        for copy in copies:
            if copy is None:
                continue
            if copy.fields:
                base = copy.base if copy.base >= 0 else self._placed(copy.data)
                pieces.append((base, self.layouts.number(copy.fields)))
            else:
                self.waiting.append((pieces, copy))
        return pieces

    def staged(self) -> None:
        """Everything is staged: fill in the places that waited."""
        number = self.layouts.number
        for pieces, copy in self.waiting:
            pieces.append((copy.base, number(copy.fields)))

    def keep(self, captured: CapturedGraph) -> int:
        """Take along what a graph left in its buffer; where it begins in the round's bytes."""
        assert captured.buffer is not None
        if self.staging is None:
            return self._placed(captured.buffer.clone())
        if not captured.lasting:
            return self.staging.stage(captured.buffer)
        captured.kept = self
        return self.staging.stage_later(captured.buffer)

    def _placed(self, data: torch.Tensor) -> int:
        if self.staging is not None:
            return self.staging.stage(data)
        base, self.size = self.size, self.size + data.numel()
        self.parts.append(data)
        return base
