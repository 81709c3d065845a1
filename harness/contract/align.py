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

#: The integer parts of a Key; rid and phase are encoded beside them.
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
    identities = key_identities((engine, reference))
    mine, theirs = identities[: len(engine)], identities[len(engine) :]
    my_first, my_repeats = _split_repeats(mine)
    their_first, their_repeats = _split_repeats(theirs)
    _, at_mine, at_theirs = np.intersect1d(mine[my_first], theirs[their_first], assume_unique=True, return_indices=True)
    order = np.argsort(my_first[at_mine], kind="stable")
    return Aligned(
        engine=my_first[at_mine][order],
        reference=their_first[at_theirs][order],
        engine_only=np.sort(np.delete(my_first, at_mine)),
        reference_only=np.sort(np.delete(their_first, at_theirs)),
        engine_repeats=my_repeats,
        reference_repeats=their_repeats,
    )


def key_identities(sides: Iterable[Rows]) -> Ints:
    """One integer a row over all sides, concatenated; equal keys share it. No key range can overflow it."""
    parts = list(sides)
    columns = [np.concatenate([rows.ints[name] for rows in parts]) for name in KEY_INTS]
    columns += [_codes(part for rows in parts for part in rows.strings[name]) for name in ("rid", "phase")]
    total = len(columns[0])
    if total == 0:
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort(columns)
    changes = np.zeros(total, dtype=bool)
    for column in columns:
        arranged = column[order]
        changes[1:] |= arranged[1:] != arranged[:-1]
    identities = np.empty(total, dtype=np.int64)
    identities[order] = np.cumsum(changes)
    return identities


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


def _split_repeats(identities: Ints) -> tuple[Ints, Ints]:
    """Row numbers of the first row of each identity, in identity order, and of all the others."""
    _, first = np.unique(identities, return_index=True)
    repeated = np.ones(len(identities), dtype=bool)
    repeated[first] = False
    return first.astype(np.int64), np.flatnonzero(repeated).astype(np.int64)


def _codes(values: Iterable[str]) -> Ints:
    """A small integer for each string, equal for equal strings."""
    seen: dict[str, int] = {}
    return np.asarray([seen.setdefault(value, len(seen)) for value in values], dtype=np.int64)
