"""The rows of a trace: a struct of arrays, made row by row or a forward at a time.

One NumPy column a field, ragged columns as one flat array with where each row's part begins. It must not judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.contract.types import Key

#: Integer columns: name -> meaning. -1 is "does not apply", never "zero".
INT_COLUMNS: dict[str, str] = {
    "dp_rank": "data-parallel rank",
    "attempt": "how many times the request had restarted from prefill (retraction)",
    "round": "index of the scheduler batch within the scenario, per rank",
    "scheduler_step": "scheduler step within the scenario",
    "committed": "tokens of the request whose target KV existed before this round (chunk start for prefill)",
    "step": "draft forward index within the round; 0 elsewhere",
    "slot": "row within the request's share of this forward; tree node index for VERIFY; j-th committed for ACCEPT",
    "input_id": "token id fed in (for ACCEPT: token committed)",
    "position": "position id fed in",
    "cache_slot": "KV slot written (for ACCEPT: slot that holds the token fed at that position afterwards)",
    "parent": "VERIFY: parent node (-1 root); ACCEPT: node whose target choice was committed",
    "hidden_in": "row in tensors['hidden_in.<PHASE>'] or -1",
    "hidden_out": "row in tensors['hidden_out.<PHASE>'] or -1",
    "slots_shared": "leading slots that attention reads for the row before it too (see slots_read); -1: not recorded",
    "attends": "DRAFT, of a reference: beam of the step before that it attends, with all that one attends; else -1",
}
STRING_COLUMNS: dict[str, str] = {"rid": "request id", "phase": "a Phase"}
FLOAT_COLUMNS: dict[str, str] = {"lse": "log-sum-exp of the row's logits, NaN if the row has none"}
#: Ragged columns: one array a row, empty if it does not apply.
LIST_COLUMNS: dict[str, type] = {
    "top_ids": np.int64,  # token ids of the largest logits, best first
    "top_logits": np.float32,  # their logits
    "chosen_ids": np.int64,  # what the side *chose* from this row: t proposals, or the target's argmax (VERIFY)
    "chosen_probs": np.float32,  # the scores it attached to them
    "slots_read": np.int64,  # KV slots that attention reads for the row, behind `slots_shared` (see slots_read below)
}
#: Columns that traces before schema 3 lack: nobody recorded what attention reads.
ADDED = ("slots_shared", "attends", "slots_read")


@dataclass(slots=True)
class Ragged:
    """R arrays of their own lengths in one: row i is values[offsets[i]:offsets[i + 1]]. offsets: int64 [R + 1]."""

    values: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def of(arrays: Sequence[Any], dtype: Any) -> Ragged:
        """From one array, or sequence, a row."""
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        values = [np.asarray(array, dtype=dtype) for array in arrays if len(array)]
        return Ragged(np.concatenate(values) if values else np.empty(0, dtype=dtype), offsets)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [R]."""
        return np.diff(self.offsets)

    def stacked(self, rows: np.ndarray) -> np.ndarray:
        """[m, w]: these rows [m], which are all w long."""
        width = int(self.lengths[rows[0]]) if len(rows) else 0
        found: np.ndarray = self.values[self.offsets[rows][:, None] + np.arange(width)]
        return found

    def greatest(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """float64 [m]: the greatest |value| of each of these rows [m], 0 of an empty one."""
        return np.asarray([np.abs(self[row]).max(initial=0.0) for row in rows], dtype=np.float64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __setitem__(self, row: int, values: np.ndarray) -> None:
        start, end = self.offsets[row], self.offsets[row + 1]
        self.values = np.concatenate([self.values[:start], values, self.values[end:]]).astype(self.values.dtype)
        self.offsets = self.offsets.copy()
        self.offsets[row + 1 :] += len(values) - (end - start)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))


@dataclass(slots=True, kw_only=True)
class Rows:
    """Struct of arrays, all columns the same length R.

    ints: name -> int64 [R]; strings: name -> object [R]; floats: name -> float32 [R]; lists: name -> Ragged of R.
    """

    ints: dict[str, np.ndarray]
    strings: dict[str, np.ndarray]
    floats: dict[str, np.ndarray]
    lists: dict[str, Ragged]

    def __len__(self) -> int:
        return len(self.strings["rid"])

    def key(self, index: int) -> Key:
        """The alignment key of row `index`."""
        return Key(
            dp_rank=int(self.ints["dp_rank"][index]),
            rid=str(self.strings["rid"][index]),
            attempt=int(self.ints["attempt"][index]),
            committed=int(self.ints["committed"][index]),
            phase=str(self.strings["phase"][index]),
            step=int(self.ints["step"][index]),
            slot=int(self.ints["slot"][index]),
        )


@dataclass(slots=True)
class Block:
    """Rows that came together, of one forward or one walk, as they are filled in.

    rid: object [r]; ints: int64 [columns, r], in the order of INT_COLUMNS; lse: float32 [r]; lists: name -> (rows that
    have one [m], their values [m, w]), or one Ragged of r.
    """

    phase: str
    rid: np.ndarray
    ints: np.ndarray
    lse: np.ndarray
    lists: dict[str, tuple[np.ndarray, np.ndarray] | Ragged] = field(default_factory=dict)

    @staticmethod
    def of(phase: str, rid: np.ndarray, **columns: Any) -> Block:
        """columns: of INT_COLUMNS, arrays [r] or one value for all; -1 where they are not named."""
        ints = np.full((len(INT_COLUMNS), len(rid)), -1, dtype=np.int64)
        for name, values in columns.items():
            ints[_PLACES[name]] = values
        return Block(phase, rid, ints, np.full(len(rid), np.nan, dtype=np.float32))

    def __len__(self) -> int:
        return len(self.rid)

    def column(self, name: str) -> np.ndarray:
        """int64 [r], to be read or written."""
        values: np.ndarray = self.ints[_PLACES[name]]
        return values

    def _ragged(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(lengths [r], values) of a list column."""
        lengths = np.zeros(len(self), dtype=np.int64)
        if name not in self.lists:
            return lengths, np.empty(0)
        held = self.lists[name]
        if isinstance(held, Ragged):
            return held.lengths, held.values
        rows, values = held
        lengths[rows] = values.shape[1]
        return lengths, values.reshape(-1)


_PLACES = {name: place for place, name in enumerate(INT_COLUMNS)}


def joined(blocks: Sequence[Block]) -> Rows:
    """The rows of all blocks, in their order."""
    blocks = [block for block in blocks if len(block)]
    if not blocks:
        return RowBuilder().build()
    ints = np.concatenate([block.ints for block in blocks], axis=1)
    phases = np.repeat(np.asarray([block.phase for block in blocks], dtype=object), [len(block) for block in blocks])
    lists = {}
    for name, dtype in LIST_COLUMNS.items():
        parts = [block._ragged(name) for block in blocks]
        offsets = np.concatenate([[0], *(lengths for lengths, _ in parts)]).cumsum()
        lists[name] = Ragged(np.concatenate([values for _, values in parts]).astype(dtype), offsets.astype(np.int64))
    return Rows(
        ints={name: ints[place] for name, place in _PLACES.items()},
        strings={"rid": np.concatenate([block.rid for block in blocks]), "phase": phases},
        floats={"lse": np.concatenate([block.lse for block in blocks])},
        lists=lists,
    )


def slots_read(rows: Rows, forward: Sequence[int]) -> Iterator[np.ndarray | None]:
    """Which KV slots attention reads for these rows, one request's of one forward in order; None: not recorded.

    As the engine's plan has them: those of the cached prefix, then what the forward itself writes and the row sees.
    A row is written down as what it adds to the row before it, since a prompt would else grow with its square.
    """
    read = np.empty(0, dtype=np.int64)
    for row in forward:
        shared = int(rows.ints["slots_shared"][row])
        read = np.concatenate([read[: max(shared, 0)], rows.lists["slots_read"][row]])
        yield None if shared < 0 else read


@dataclass(slots=True)
class RowBuilder:
    """Collects rows one by one; `build` makes columns of them."""

    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in (*INT_COLUMNS, *STRING_COLUMNS, *FLOAT_COLUMNS, *LIST_COLUMNS)}
    )

    def add(self, **columns: Any) -> None:
        """One row: see `extend`."""
        self.extend(1, **{name: [value] for name, value in columns.items()})

    def extend(self, count: int, **columns: Sequence[Any]) -> None:
        """`count` rows at once: a value a row for each column named, the others as they are where they do not apply."""
        if odd := columns.keys() - self.columns.keys():
            raise TypeError(f"rows have no {', '.join(sorted(odd))}")
        for name, column in self.columns.items():
            column.extend(columns[name] if name in columns else [_ABSENT[name]] * count)

    def build(self) -> Rows:
        c = self.columns
        return Rows(
            ints={name: np.asarray(c[name], dtype=np.int64) for name in INT_COLUMNS},
            strings={name: np.asarray(c[name], dtype=object) for name in STRING_COLUMNS},
            floats={name: np.asarray(c[name], dtype=np.float32) for name in FLOAT_COLUMNS},
            lists={name: Ragged.of(c[name], dtype) for name, dtype in LIST_COLUMNS.items()},
        )


#: What a row says of a column that does not apply to it.
_ABSENT: dict[str, Any] = {
    **dict.fromkeys(INT_COLUMNS, -1),
    **dict.fromkeys(("dp_rank", "attempt", "step"), 0),
    **dict.fromkeys(FLOAT_COLUMNS, float("nan")),
    **dict.fromkeys(LIST_COLUMNS, ()),
}
