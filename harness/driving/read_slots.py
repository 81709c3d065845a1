"""Which KV slots attention reads for each row of a forward, worked out of the plan that its kernels were given.

Control side: NumPy only. Arrays in, arrays out. It must not judge: what the plan says is what is written down, rows
that no sequence of it covers included (they read nothing).

Symbols: s sequences of the plan, R rows of the forward, m rows that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.both_sides.wire import Arrays
from harness.contract.rows import Ragged

#: What the probe calls the arrays of a plan.
PREFIX = "read_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """starts [s+1], cached: where each sequence's cached slots lie; slots [R]: what each row of the forward writes.

    rows [s+1]: rows of each sequence, None where each has one and its own slot is cached already (a draft step). mask,
    masks [s+1]: which of cached and own rows each row sees; None: own rows up to itself where it is causal, else all.
    changed: which cached slots hold something else than was written; None where nobody looked.
    """

    starts: np.ndarray
    cached: np.ndarray
    slots: np.ndarray
    rows: np.ndarray | None = None
    mask: np.ndarray | None = None
    masks: np.ndarray | None = None
    changed: np.ndarray | None = None
    causal: bool = True
    prefix_masked: bool = False

    @staticmethod
    def taken_from(found: Arrays, event: dict[str, Any]) -> Plan | None:
        """Of a forward's arrays, which then are those of its rows alone; None where nobody recorded it."""
        arrays = {name.removeprefix(PREFIX): found.pop(name) for name in tuple(found) if name.startswith(PREFIX)}
        if "indptr" not in arrays:
            return None
        return Plan(
            starts=arrays["indptr"],
            cached=arrays["slots"],
            slots=found["cache_slots"],
            rows=arrays.get("rows"),
            mask=arrays.get("mask"),
            masks=arrays.get("masks"),
            changed=arrays.get("changed"),
            causal=event["causal"],
            prefix_masked=event["prefix_masked"],
        )

    def read_by(self, rows: np.ndarray, owners: np.ndarray) -> Arrays:
        """rows [m]: numbers of those that are kept, in order; owners [m]: which request each belongs to.

        shared [m]: how many leading slots a row reads as the row before it of that request does; slots and offsets:
        those behind them, row by row.
        """
        shared, behind = list[int](), list[np.ndarray]()
        owner, at, number = -1, -1, -2  # of the row before
        for row, whose in zip(rows.tolist(), owners.tolist(), strict=True):
            block, mine = self._block(row), whose == owner
            if mine and block == at and row == number + 1 and self._grows:
                shared.append(shared[-1] + len(behind[-1]))
                behind.append(self.slots[row : row + 1])
            else:
                own = self._read(row, block)
                shared.append(_alike(self._read(number, at), own) if mine else 0)
                behind.append(own[shared[-1] :])
            owner, at, number = whose, block, row
        listed = Ragged.of(behind, np.int64)
        return {
            "read_shared": np.asarray(shared, dtype=np.int64),
            "read_slots": listed.values,
            "read_offsets": listed.offsets,
        }

    def changed_for(self, rows: np.ndarray, owners: np.ndarray, requests: int) -> list[list[int]]:
        """Cached slots that hold something else than was written, of those that each request reads; rows as above."""
        found: list[set[int]] = [set() for _ in range(requests)]
        if self.changed is None or not self.changed.any():
            return []
        for row, whose in zip(rows.tolist(), owners.tolist(), strict=True):
            if (block := self._block(row)) >= 0:
                part = slice(int(self.starts[block]), int(self.starts[block + 1]))
                found[whose] |= set(self.cached[part][self.changed[part].astype(bool)].tolist())
        return [sorted(slots) for slots in found]

    @property
    def _grows(self) -> bool:
        """Whether a row reads what the row before it in its sequence does, and itself."""
        return self.rows is not None and self.mask is None and self.causal

    def _block(self, row: int) -> int:
        """The sequence that covers a row, -1 for none."""
        if self.rows is None:
            return row if row < len(self.starts) - 1 else -1
        found = int(np.searchsorted(self.rows, row, side="right")) - 1
        return found if found < len(self.rows) - 1 else -1

    def _read(self, row: int, block: int) -> np.ndarray:
        """int64 [w]: the slots of one row, cached ones first."""
        if block < 0:
            return np.empty(0, dtype=np.int64)
        cached = self.cached[self.starts[block] : self.starts[block + 1]]
        if self.rows is None:
            return cached
        first, end = int(self.rows[block]), int(self.rows[block + 1])
        own = self.slots[first:end]
        if self.mask is None or self.masks is None:
            return np.concatenate([cached, own[: row - first + 1] if self.causal else own])
        width = len(cached) + len(own)
        begin = int(self.masks[block]) + (row - first) * width
        seen = self.mask[begin : begin + width].astype(bool)
        if len(seen) < width:  # the mask ends before it: nobody knows what a kernel finds there
            return np.empty(0, dtype=np.int64)
        seen[: len(cached)] |= not self.prefix_masked
        found: np.ndarray = np.concatenate([cached, own])[seen]
        return found


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading entries two arrays share."""
    width = min(len(one), len(other))
    differ = np.flatnonzero(one[:width] != other[:width])
    return int(differ[0]) if len(differ) else width
