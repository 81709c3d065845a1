"""The rows of a trace as a parquet file, and back. The only module that imports pyarrow for a trace.

It must not trust a file: see `harness.archive.faults`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.archive.faults import check_version, damaged
from harness.contract.rows import ADDED, FLOAT_COLUMNS, INT_COLUMNS, LIST_COLUMNS, STRING_COLUMNS, Ragged, Rows
from harness.contract.trace import TRACE_SCHEMA

VERSION_KEY = b"eaglecheck.trace"
#: Columns as traces of schema 1 have them.
OLD_NAMES = {"epoch": "attempt", "tick": "scheduler_step"}

#: The first schema with the columns of `ADDED`.
ADDED_IN = 3

#: What each list column holds on disk.
LIST_TYPES: dict[type, pa.DataType] = {np.int64: pa.int64(), np.float32: pa.float32()}


def arrow_schema(version: int = TRACE_SCHEMA) -> pa.Schema:
    """The columns of `<side>.parquet`, in order, with the version in the metadata."""
    fields = [pa.field(name, pa.int64()) for name in INT_COLUMNS]
    fields += [pa.field(name, pa.dictionary(pa.int32(), pa.string())) for name in STRING_COLUMNS]
    fields += [pa.field(name, pa.float32()) for name in FLOAT_COLUMNS]
    fields += [pa.field(name, pa.list_(LIST_TYPES[kind])) for name, kind in LIST_COLUMNS.items()]
    fields = [field for field in fields if version >= ADDED_IN or field.name not in ADDED]
    return pa.schema(fields, metadata={VERSION_KEY: str(version).encode()})


def rows_bytes(rows: Rows) -> bytes:
    """The parquet file of these rows; equal rows give equal bytes."""
    buffer = pa.BufferOutputStream()
    pq.write_table(_table(rows), buffer, compression="zstd", write_page_checksum=True)
    return bytes(buffer.getvalue().to_pybytes())


def _table(rows: Rows) -> pa.Table:
    columns: list[pa.Array] = [pa.array(rows.ints[name], type=pa.int64()) for name in INT_COLUMNS]
    for name in STRING_COLUMNS:
        columns.append(pa.array([str(text) for text in rows.strings[name]], type=pa.string()).dictionary_encode())
    columns += [pa.array(rows.floats[name], type=pa.float32()) for name in FLOAT_COLUMNS]
    for name, kind in LIST_COLUMNS.items():
        offsets, values = rows.lists[name].offsets.astype(np.int32), rows.lists[name].values
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, type=LIST_TYPES[kind])))
    return pa.Table.from_arrays(columns, schema=arrow_schema())


def read_rows(file: Path, content: bytes, row_count: int) -> Rows:
    """The rows in `content`, which is what `file` holds; TraceError if it is unfit, or holds not so many."""
    try:
        parquet = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        schema = _in_todays_names(parquet.schema_arrow)
        version = (schema.metadata or {}).get(VERSION_KEY, b"")
        if version.isdigit():
            check_version(file, int(version))
        wanted = arrow_schema(int(version) if version.isdigit() else TRACE_SCHEMA)
        if set(schema.names) != set(wanted.names) or not schema.equals(wanted) or not version.isdigit():
            raise damaged(
                file, _schema_difference(schema, wanted), "the columns of harness/contract/rows.py with our version"
            )
        # Arrow's threads would share Python's bytes, and one that lets go of them while Python ends kills the process:
        # "terminate called without an active exception" (apache/arrow issue 34314)
        table = parquet.read(use_threads=False).rename_columns(schema.names)
    except (pa.ArrowException, OSError) as error:  # what is inside a page fails as an OSError
        raise damaged(file, "not a whole parquet file", "parquet, as it was written") from error
    if table.num_rows != row_count:
        raise damaged(file, f"{table.num_rows} rows", f"{row_count} rows, as the JSON file beside it says")
    if any(column.null_count for column in table.columns):
        raise damaged(file, "empty cells", "a value in every cell")
    return _rows(table)


def _in_todays_names(schema: pa.Schema) -> pa.Schema:
    """Traces of schema 1 called two columns otherwise."""
    fields = [field.with_name(OLD_NAMES.get(field.name, field.name)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _schema_difference(schema: pa.Schema, wanted: pa.Schema) -> str:
    foreign = sorted(set(schema.names) - set(wanted.names))
    missing = sorted(set(wanted.names) - set(schema.names))
    other = [name for name in wanted.names if name in schema.names and schema.field(name) != wanted.field(name)]
    parts = [f"unknown columns {', '.join(foreign)}"] if foreign else []
    parts += [f"missing columns {', '.join(missing)}"] if missing else []
    parts += [f"other types in {', '.join(other)}"] if other else []
    return "; ".join(parts) or "columns in another order, or no eaglecheck version in the metadata"


def _rows(table: pa.Table) -> Rows:
    there = set(table.column_names)
    ints = {name: table.column(name).to_numpy().astype(np.int64) for name in INT_COLUMNS if name in there}
    lists = {
        name: _ragged(table.column(name).combine_chunks(), kind) for name, kind in LIST_COLUMNS.items() if name in there
    }
    ints |= {name: np.full(table.num_rows, -1, dtype=np.int64) for name in INT_COLUMNS if name not in there}
    lists |= {name: Ragged.of([()] * table.num_rows, kind) for name, kind in LIST_COLUMNS.items() if name not in there}
    return Rows(
        ints=ints,
        strings={name: np.asarray(table.column(name).to_pylist(), dtype=object) for name in STRING_COLUMNS},
        floats={name: table.column(name).to_numpy().astype(np.float32) for name in FLOAT_COLUMNS},
        lists=lists,
    )


def _ragged(array: pa.ListArray, kind: type) -> Ragged:
    values = array.values.to_numpy(zero_copy_only=False)
    return Ragged(values.astype(kind), array.offsets.to_numpy().astype(np.int64))
