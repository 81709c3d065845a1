"""Joins engine rows and reference rows by meaning.

Two rows belong together when their `Key` is equal: (dp_rank, rid, attempt, committed, phase, step, slot). Order of
arrival never matters. This module must not compare values: it only says which rows may be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.contract.rows import Rows
from harness.contract.types import Divergence, Key, Kind

Ints = npt.NDArray[np.int64]

#: The integer parts of a Key; rid and phase stand beside them.
KEY_INTS = ("dp_rank", "attempt", "committed", "step", "slot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """Row numbers, all int64.

    engine, reference: [m] row numbers of the m pairs (same key), in engine order.
    engine_only, reference_only: rows whose key the other side lacks.
    engine_repeats, reference_repeats: second and later rows of a key on one side.
    """

    engine: Ints
    reference: Ints
    engine_only: Ints
    reference_only: Ints
    engine_repeats: Ints
    reference_repeats: Ints


def align(engine: Rows, reference: Rows) -> Aligned:
    """Pair the rows of two sides; a repeated key pairs through its first row."""
    mine, my_repeats = _first_rows(engine)
    theirs, their_repeats = _first_rows(reference)
    pairs = [(row, theirs[key]) for key, row in mine.items() if key in theirs]
    return Aligned(
        engine=_ints(row for row, _ in pairs),
        reference=_ints(row for _, row in pairs),
        engine_only=_ints(row for key, row in mine.items() if key not in theirs),
        reference_only=_ints(row for key, row in theirs.items() if key not in mine),
        engine_repeats=_ints(my_repeats),
        reference_repeats=_ints(their_repeats),
    )


def _first_rows(rows: Rows) -> tuple[dict[tuple[int | str, ...], int], list[int]]:
    """(key -> its first row, every other row)."""
    columns = [rows.ints[name] for name in KEY_INTS] + [rows.strings[name] for name in ("rid", "phase")]
    first, repeats = dict[tuple[int | str, ...], int](), list[int]()
    for row, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if first.setdefault(key, row) != row:
            repeats.append(row)
    return first, repeats


def _ints(rows: Iterable[int]) -> Ints:
    return np.fromiter(rows, dtype=np.int64)


def unpaired(aligned: Aligned, engine: Rows, reference: Rows) -> Iterator[Divergence]:
    """MISSING_ROW and EXTRA_ROW for every key that one side lacks or repeats."""
    for index in aligned.reference_only:
        yield _row_divergence(Kind.MISSING_ROW, reference, int(index), expected="a row", observed="none")
    for index in aligned.engine_only:
        yield _row_divergence(Kind.EXTRA_ROW, engine, int(index), expected="none", observed="a row")
    for index in aligned.engine_repeats:
        yield _row_divergence(Kind.EXTRA_ROW, engine, int(index), expected="one row", observed="another", hint="twice")
    for index in aligned.reference_repeats:
        yield _row_divergence(
            Kind.EXTRA_ROW, reference, int(index), expected="another", observed="one row", hint="twice-in-reference"
        )


def _row_divergence(kind: Kind, rows: Rows, index: int, *, expected: str, observed: str, hint: str = "") -> Divergence:
    key: Key = rows.key(index)
    where = int(rows.ints["round"][index])
    return Divergence(kind=kind, key=key, round=where, expected=expected, observed=observed, hint=hint)
