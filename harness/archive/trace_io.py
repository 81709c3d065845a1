"""A Trace on disk: `<side>.json`, `<side>.parquet`, `tensors/<side>.safetensors` in one folder. No pickle.

Equal traces give equal bytes. Reading trusts nothing: every way a file can be unfit ends in one TraceError that says
which file, what was found, what is allowed, and what to do. This module must not judge.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors
import safetensors.numpy
from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.archive import digests, event_facts
from harness.archive.again import run_again
from harness.archive.facts import Header
from harness.contract import plain_files
from harness.contract.strict_json import NotJSON, parsed
from harness.contract.trace import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    LIST_COLUMNS,
    STRING_COLUMNS,
    TRACE_SCHEMA,
    Event,
    RequestEnd,
    RoundRecord,
    Rows,
    Trace,
)
from harness.contract.types import POOL, POOL_IS
from harness.contract.validation import Unfit, validated

SIDES = ("engine", "reference")
VERSION_KEY = b"eaglecheck.trace"

#: What each list column holds on disk.
LIST_TYPES: dict[type, pa.DataType] = {np.int64: pa.int64(), np.float32: pa.float32()}


class TraceError(Exception):
    """A trace file that cannot be used; the text is meant for people."""

    def __init__(self, file: Path, *, found: str, allowed: str, do: str) -> None:
        super().__init__(f"cannot read trace file {file}\n  found: {found}\n  allowed: {allowed}\n  {do}")
        self.file = file


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


#: Places of a request, or rows of it: no engine has room for more, and each is walked over.
Tokens = Annotated[int, Field(ge=0, le=POOL, description=POOL_IS)]


class _Round(_Strict):
    index: int
    tick: int
    dp_rank: int
    tp_rank: int
    mode: str
    rids: tuple[str, ...]
    epochs: tuple[int, ...]
    starts: tuple[Tokens, ...]
    lens: tuple[Tokens, ...]
    final: tuple[bool, ...]
    forwards: dict[str, int]
    graphs: dict[str, int] = {}
    side: str = ""

    @model_validator(mode="after")
    def _is_of_its_requests(self) -> _Round:
        for name in ("epochs", "starts", "lens", "final"):
            if len(getattr(self, name)) != len(self.rids):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(self.rids)} rids")
        return self


class _End(_Strict):
    rid: str
    tick: int
    reason: str
    output_ids: tuple[int, ...]
    cached_tokens: int


class _Event(_Strict):
    name: str
    tick: int
    dp_rank: int
    data: dict[str, Any]

    @model_validator(mode="after")
    def _is_read_so(self) -> _Event:
        if why := event_facts.unfit(self.name, self.data):
            raise ValueError(why)
        return self


class _Head(_Strict):
    """The JSON file: everything of a trace that is not a row or a tensor."""

    trace_schema: int
    side: Literal["engine", "reference"]
    scenario_id: str
    row_count: int
    header: Header
    rounds: list[_Round]
    ends: list[_End]
    events: list[_Event]


def arrow_schema() -> pa.Schema:
    """The columns of `<side>.parquet`, in order, with the version in the metadata."""
    fields = [pa.field(name, pa.int64()) for name in INT_COLUMNS]
    fields += [pa.field(name, pa.dictionary(pa.int32(), pa.string())) for name in STRING_COLUMNS]
    fields += [pa.field(name, pa.float32()) for name in FLOAT_COLUMNS]
    fields += [pa.field(name, pa.list_(LIST_TYPES[kind])) for name, kind in LIST_COLUMNS.items()]
    return pa.schema(fields, metadata={VERSION_KEY: str(TRACE_SCHEMA).encode()})


def trace_files(folder: Path, side: str) -> dict[str, Path]:
    """Where the three files of one side lie."""
    return {
        "json": folder / f"{side}.json",
        "rows": folder / f"{side}.parquet",
        "tensors": folder / "tensors" / f"{side}.safetensors",
    }


def write_trace(folder: Path, trace: Trace) -> list[Path]:
    """Write one side into `folder` (made if needed). The JSON file comes last: without it there is no trace."""
    files = trace_files(folder, trace.side)
    files["tensors"].parent.mkdir(parents=True, exist_ok=True)
    _replace(
        files["tensors"], safetensors.numpy.save(_contiguous(trace.tensors), metadata={"trace": str(TRACE_SCHEMA)})
    )
    buffer = pa.BufferOutputStream()
    pq.write_table(_table(trace.rows), buffer, compression="zstd", write_page_checksum=True)
    _replace(files["rows"], buffer.getvalue().to_pybytes())
    _replace(files["json"], _head_bytes(trace))
    return list(files.values())


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all: a reader never sees half a file."""
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(content)
    os.replace(draft, path)


def _contiguous(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(tensor, dtype=np.float32) for name, tensor in sorted(tensors.items())}


def _table(rows: Rows) -> pa.Table:
    columns: list[pa.Array] = [pa.array(rows.ints[name], type=pa.int64()) for name in INT_COLUMNS]
    for name in STRING_COLUMNS:
        columns.append(pa.array([str(text) for text in rows.strings[name]], type=pa.string()).dictionary_encode())
    columns += [pa.array(rows.floats[name], type=pa.float32()) for name in FLOAT_COLUMNS]
    for name, kind in LIST_COLUMNS.items():
        columns.append(_list_array(rows.lists[name], kind))
    return pa.Table.from_arrays(columns, schema=arrow_schema())


def _list_array(values: list[np.ndarray], kind: type) -> pa.Array:
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    flat: np.ndarray = np.concatenate(values).astype(kind) if values else np.zeros(0, dtype=kind)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, type=LIST_TYPES[kind]))


def _head_bytes(trace: Trace) -> bytes:
    content = {
        "trace_schema": TRACE_SCHEMA,
        "side": trace.side,
        "scenario_id": trace.scenario_id,
        "row_count": len(trace.rows),
        "header": trace.header,
        "rounds": [_fields(record) for record in trace.rounds],
        "ends": [_fields(end) for end in trace.ends],
        "events": [_fields(event) for event in trace.events],
    }
    return (json.dumps(plain(content), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _fields(record: RoundRecord | RequestEnd | Event) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def plain(value: Any) -> Any:
    """JSON-ready copy: arrays and tuples as lists, NumPy scalars as numbers, floats that JSON lacks as text."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)  # 'inf', '-inf', 'nan': float() reads them back
    return value


def read_trace(folder: Path, side: str) -> Trace:
    """One side from `folder`; TraceError if anything about it is unfit."""
    files = trace_files(folder, side)
    for file in files.values():
        if not file.exists():
            present = ", ".join(sorted(path.name for path in folder.glob("*"))) if folder.is_dir() else "no folder"
            raise TraceError(
                file,
                found=f"no such file (present: {present or 'nothing'})",
                allowed=", ".join(path.relative_to(folder).as_posix() for path in files.values()),
                do=f"{_why_gone(folder, files['json'])}, or {_run_again(folder)}",
            )
    content = {name: _bytes(file) for name, file in files.items()}
    head = _read_head(files["json"], content["json"], side)
    rows = _read_rows(files["rows"], content["rows"], head.row_count)
    tensors = _read_tensors(files["tensors"], content["tensors"])
    written = digests.read_sums(folder)
    for name, file in files.items():  # last: whoever finds out more says more
        place = file.relative_to(folder).as_posix()
        if digests.silent(written, place) or digests.changed(written, place, content[name]):
            raise _damaged(file, digests.CHANGED, f"the bytes that {digests.SUMS} beside it names")
    _check_pointers(files["tensors"], rows, tensors)
    return Trace(
        side=head.side,
        scenario_id=head.scenario_id,
        header=head.header,
        rows=rows,
        rounds=tuple(RoundRecord(**dict(record)) for record in head.rounds),
        ends=tuple(RequestEnd(**dict(end)) for end in head.ends),
        events=tuple(Event(**dict(event)) for event in head.events),
        tensors=tensors,
    )


def _bytes(file: Path) -> bytes:
    try:
        return plain_files.content(file)
    except OSError as error:
        raise TraceError(
            file, found=str(error.strerror), allowed="a file that can be read", do=_run_again(_folder(file))
        ) from error


def _check_version(file: Path, found: int) -> None:
    if found != TRACE_SCHEMA:
        newer = found > TRACE_SCHEMA
        raise TraceError(
            file,
            found=f"trace version {found}",
            allowed=f"trace version {TRACE_SCHEMA}",
            do="a newer eaglecheck wrote it: update this one"
            if newer
            else f"an old eaglecheck wrote it: {_run_again(_folder(file))}",
        )


def _read_head(file: Path, written: bytes, side: str) -> _Head:
    try:
        content = parsed(written)
        if isinstance(content, dict) and isinstance(content.get("trace_schema"), int):
            _check_version(file, content["trace_schema"])
        head = validated(content, _Head)
    except NotJSON as error:
        raise _damaged(file, str(error), "JSON, whole") from error
    except Unfit as error:
        found, _, allowed = str(error).partition("\n  allowed")
        raise _damaged(file, found, allowed.lstrip(": ") or f"keys {', '.join(_Head.model_fields)}") from error
    if head.side != side:
        raise _damaged(file, f"the trace of side {head.side!r}", f"side {side!r}")
    return head


def header_of(file: Path) -> dict[str, Any] | None:
    """The header in a trace's JSON file, whatever else of the trace is unfit; None where there is none to be read."""
    try:
        found = parsed(plain_files.content(file))
    except (OSError, NotJSON):
        return None
    header = found.get("header") if isinstance(found, dict) else None
    return header if isinstance(header, dict) else None


def _why_gone(folder: Path, head: Path) -> str:
    """The JSON file is written last: without it nothing was finished; with it the rest was there once."""
    if not folder.is_dir() or not head.is_file():
        return "the run was cut off before this trace was whole, or the folder was not copied whole: get it again"
    return "the file was there when the trace was finished and is gone since: get the folder again, whole"


def _run_again(folder: Path) -> str:
    return f"run again:  {run_again(folder)}"


def _damaged(file: Path, found: str, allowed: str) -> TraceError:
    return TraceError(
        file, found=found, allowed=allowed, do=f"the file is damaged or not ours: {_run_again(_folder(file))}"
    )


def _folder(file: Path) -> Path:
    """The scenario's folder that a trace file is in."""
    return file.parent.parent if file.parent.name == "tensors" else file.parent


def _read_rows(file: Path, content: bytes, row_count: int) -> Rows:
    wanted = arrow_schema()
    try:
        parquet = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        schema = parquet.schema_arrow
        version = (schema.metadata or {}).get(VERSION_KEY, b"")
        if version.isdigit():
            _check_version(file, int(version))
        if set(schema.names) != set(wanted.names) or not schema.equals(wanted) or not version.isdigit():
            raise _damaged(
                file, _schema_difference(schema, wanted), "the columns of harness/contract/trace.py with our version"
            )
        # Arrow's threads would share Python's bytes, and one that lets go of them while Python ends kills the process:
        # "terminate called without an active exception" (apache/arrow issue 34314)
        table = parquet.read(use_threads=False)
    except (pa.ArrowException, OSError) as error:  # what is inside a page fails as an OSError
        raise _damaged(file, "not a whole parquet file", "parquet, as it was written") from error
    if table.num_rows != row_count:
        raise _damaged(file, f"{table.num_rows} rows", f"{row_count} rows, as the JSON file beside it says")
    if any(column.null_count for column in table.columns):
        raise _damaged(file, "empty cells", "a value in every cell")
    return _rows(table)


def _schema_difference(schema: pa.Schema, wanted: pa.Schema) -> str:
    foreign = sorted(set(schema.names) - set(wanted.names))
    missing = sorted(set(wanted.names) - set(schema.names))
    other = [name for name in wanted.names if name in schema.names and schema.field(name) != wanted.field(name)]
    parts = [f"foreign columns {', '.join(foreign)}"] if foreign else []
    parts += [f"no columns {', '.join(missing)}"] if missing else []
    parts += [f"other types in {', '.join(other)}"] if other else []
    return "; ".join(parts) or "columns in another order, or no eaglecheck version in the metadata"


def _rows(table: pa.Table) -> Rows:
    lists: dict[str, list[np.ndarray]] = {}
    for name, kind in LIST_COLUMNS.items():
        array = table.column(name).combine_chunks()
        offsets, flat = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False).astype(kind)
        lists[name] = [flat[start:end] for start, end in pairwise(offsets.tolist())]
    return Rows(
        ints={name: table.column(name).to_numpy().astype(np.int64) for name in INT_COLUMNS},
        strings={name: np.asarray(table.column(name).to_pylist(), dtype=object) for name in STRING_COLUMNS},
        floats={name: table.column(name).to_numpy().astype(np.float32) for name in FLOAT_COLUMNS},
        lists=lists,
    )


def _read_tensors(file: Path, content: bytes) -> dict[str, np.ndarray]:
    try:
        tensors: dict[str, np.ndarray] = safetensors.numpy.load(content)
    except safetensors.SafetensorError as error:
        raise _damaged(file, "not a whole safetensors file", "safetensors, float32 [rows, width]") from error
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or tensor.dtype != np.float32:
            raise _damaged(file, f"{name}: {tensor.dtype} {list(tensor.shape)}", "float32 [rows, width]")
    return tensors


def _check_pointers(file: Path, rows: Rows, tensors: dict[str, np.ndarray]) -> None:
    """Every hidden row a row points at exists."""
    for side in ("hidden_in", "hidden_out"):
        at = rows.ints[side]
        for phase in set(rows.strings["phase"][at >= 0]):
            name, most = f"{side}.{phase}", int(at[rows.strings["phase"] == phase].max())
            height = len(tensors[name]) if name in tensors else 0
            if most >= height:
                raise _damaged(
                    file, f"{name} has {height} rows", f"at least {most + 1}, since a trace row points there"
                )
