"""What every frame holds, column by column: name, dtype, unit and meaning, from columns.toml.

A frame with a column that is not described there cannot be made. This module must not read runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

#: pandas dtype -> how it lies in Parquet. `list` is an object column of tuples, the one thing pandas has no dtype for.
ARROW: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "Int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "boolean": pa.bool_(),
    "list": pa.list_(pa.int64()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. dtype: a key of ARROW. unit: what one counts, or empty for names and ids."""

    name: str
    dtype: str
    unit: str
    meaning: str


_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _columns(words: str) -> tuple[Column, ...]:
    described = (item for word in words.split() for item in _TABLES["columns"][word].items())
    return tuple(
        Column(name=name, dtype=dtype, unit=unit, meaning=meaning) for name, (dtype, unit, meaning) in described
    )


#: Every frame by name, in the order of the documentation.
FRAMES: dict[str, tuple[Column, ...]] = {name: _columns(one["columns"]) for name, one in _TABLES["frame"].items()}


def frame(name: str, values: Mapping[str, Any]) -> pd.DataFrame:
    """The frame `name` from a sequence (or a scalar, repeated) a column; ValueError for any other set of columns."""
    wanted = FRAMES[name]
    missing, foreign = {c.name for c in wanted} - set(values), set(values) - {c.name for c in wanted}
    if missing or foreign:
        raise ValueError(f"frame {name!r}: missing {sorted(missing)}, not described {sorted(foreign)}")
    length = next((len(value) for value in values.values() if _is_many(value)), 0)
    return pd.DataFrame({column.name: _series(values[column.name], column, length) for column in wanted})


def empty(name: str) -> pd.DataFrame:
    """The frame `name` without rows, every column of its dtype."""
    return frame(name, {column.name: [] for column in FRAMES[name]})


def arrow_schema(name: str) -> pa.Schema:
    """How the frame lies in Parquet; unit and meaning travel as field metadata."""
    return pa.schema(
        [
            pa.field(c.name, ARROW[c.dtype], metadata={b"unit": c.unit.encode(), b"meaning": c.meaning.encode()})
            for c in FRAMES[name]
        ]
    )


def join(name: str, parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Frames of one sort under each other, rows numbered anew; the empty frame where there are none."""
    kept: Sequence[pd.DataFrame] = [part for part in parts if len(part)]
    return pd.concat(kept, ignore_index=True) if kept else empty(name)


def _is_many(value: Any) -> bool:
    return not isinstance(value, str) and hasattr(value, "__len__")


def _series(value: Any, column: Column, length: int) -> pd.Series:
    if not _is_many(value):
        value = [value] * length
    if column.dtype != "list":
        return pd.Series(value, dtype=column.dtype, name=column.name)
    held = np.empty(len(value), dtype=object)
    held[:] = [tuple(int(one) for one in many) for many in value]
    return pd.Series(held, dtype=object, name=column.name)
