"""A Trace on disk: `<side>.json`, `<side>.parquet`, `tensors/<side>.safetensors` in one folder. No pickle.

Equal traces give equal bytes. Reading trusts nothing: every way a file can be unfit ends in one TraceError that says
which file, what was found, what is allowed, and what to do. This module must not judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import safetensors
import safetensors.numpy
from pydantic import AfterValidator, AliasChoices, Field, model_validator

from harness.archive import digests, event_facts
from harness.archive.facts import Header
from harness.archive.faults import TraceError, check_version, damaged, folder_of, run_again_in
from harness.contract import plain_files
from harness.contract.json_files import BadDocument, NotJSON, parsed, validated
from harness.contract.requests import Strict
from harness.contract.rows import Rows
from harness.contract.settings import MOST_STEPS, POOL, POOL_IS
from harness.contract.trace import TRACE_SCHEMA, Event, RequestEnd, RoundRecord, Trace

SIDES = ("engine", "reference")


#: Places of a request, or rows of it: no engine has room for more, and each is walked over.
Tokens = Annotated[int, Field(ge=0, le=POOL, description=POOL_IS)]


#: Traces of schema 1 called it so.
_Step = Annotated[int, Field(validation_alias=AliasChoices("scheduler_step", "tick"))]
#: Older names of events and of what they say.
OLD_NAMES = {"epoch": "attempt", "epochs": "attempts", "coins": "uniforms"}


def _in_todays_names(data: dict[str, Any]) -> dict[str, Any]:
    return {OLD_NAMES.get(key, key): value for key, value in data.items()}


class _Round(Strict):
    index: int
    scheduler_step: _Step
    dp_rank: int
    tp_rank: int
    mode: str
    rids: tuple[str, ...]
    attempts: Annotated[tuple[int, ...], Field(validation_alias=AliasChoices("attempts", "epochs"))]
    starts: tuple[Tokens, ...]
    lens: tuple[Tokens, ...]
    final: tuple[bool, ...]
    forwards: dict[str, int]
    graphs: dict[str, int] = Field(default_factory=dict)
    side: str = ""
    num_steps: Annotated[int, Field(ge=-1, le=MOST_STEPS)] = -1

    @model_validator(mode="after")
    def _is_of_its_requests(self) -> _Round:
        for name in ("attempts", "starts", "lens", "final"):
            if len(getattr(self, name)) != len(self.rids):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(self.rids)} rids")
        return self


class _End(Strict):
    rid: str
    scheduler_step: _Step
    reason: str
    output_ids: tuple[int, ...]
    cached_tokens: int


class _Event(Strict):
    name: Annotated[str, AfterValidator(lambda name: OLD_NAMES.get(name, name))]
    scheduler_step: _Step
    dp_rank: int
    data: Annotated[dict[str, Any], AfterValidator(_in_todays_names)]

    @model_validator(mode="after")
    def _is_read_so(self) -> _Event:
        if why := event_facts.unfit(self.name, self.data):
            raise ValueError(why)
        return self


class _Head(Strict):
    """The JSON file: everything of a trace that is not a row or a tensor."""

    trace_schema: int
    side: Literal["engine", "reference"]
    scenario_id: str
    row_count: int
    header: Header
    rounds: list[_Round]
    ends: list[_End]
    events: list[_Event]


def trace_files(folder: Path, side: str) -> dict[str, Path]:
    """Where the three files of one side lie."""
    return {
        "json": folder / f"{side}.json",
        "rows": folder / f"{side}.parquet",
        "tensors": folder / "tensors" / f"{side}.safetensors",
    }


def write_trace(folder: Path, trace: Trace) -> list[Path]:
    """Write one side into `folder` (made if needed). The JSON file comes last: without it there is no trace."""
    from harness.archive.trace_table import rows_bytes  # pyarrow, which whoever keeps no trace need not wait for

    files = trace_files(folder, trace.side)
    files["tensors"].parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(one, dtype=np.float32) for name, one in sorted(trace.tensors.items())}
    metadata = {"trace": str(TRACE_SCHEMA)}
    plain_files.replace(files["tensors"], safetensors.numpy.save(tensors, metadata=metadata))
    plain_files.replace(files["rows"], rows_bytes(trace.rows))
    plain_files.replace(files["json"], _head_bytes(trace))
    return list(files.values())


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
    from harness.archive.trace_table import read_rows

    files = trace_files(folder, side)
    for file in files.values():
        if not file.exists():
            present = ", ".join(sorted(path.name for path in folder.glob("*"))) if folder.is_dir() else "no folder"
            raise TraceError(
                file,
                found=f"no such file (present: {present or 'nothing'})",
                allowed=", ".join(path.relative_to(folder).as_posix() for path in files.values()),
                do=f"{_why_gone(folder, files['json'])}, or {run_again_in(folder)}",
            )
    content = {name: _bytes(file) for name, file in files.items()}
    head = _read_head(files["json"], content["json"], side)
    rows = read_rows(files["rows"], content["rows"], head.row_count)
    tensors = _read_tensors(files["tensors"], content["tensors"])
    written = digests.read_sums(folder)
    for name, file in files.items():  # last: whoever finds out more says more
        place = file.relative_to(folder).as_posix()
        if digests.silent(written, place) or digests.changed(written, place, content[name]):
            raise damaged(file, digests.CHANGED, f"the bytes that {digests.SUMS} beside it names")
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
            file, found=str(error.strerror), allowed="a file that can be read", do=run_again_in(folder_of(file))
        ) from error


def _read_head(file: Path, written: bytes, side: str) -> _Head:
    try:
        content = parsed(written)
        if isinstance(content, dict) and isinstance(content.get("trace_schema"), int):
            check_version(file, content["trace_schema"])
        head = validated(content, _Head)
    except NotJSON as error:
        raise damaged(file, str(error), "JSON, whole") from error
    except BadDocument as error:
        found, _, allowed = str(error).partition("\n  allowed")
        raise damaged(file, found, allowed.strip(": ") or "what eaglecheck writes") from error
    if head.side != side:
        raise damaged(file, f"the trace of side {head.side!r}", f"side {side!r}")
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


def _read_tensors(file: Path, content: bytes) -> dict[str, np.ndarray]:
    try:
        tensors: dict[str, np.ndarray] = safetensors.numpy.load(content)
    except safetensors.SafetensorError as error:
        raise damaged(file, "not a whole safetensors file", "safetensors, float32 [rows, width]") from error
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or tensor.dtype != np.float32:
            raise damaged(file, f"{name}: {tensor.dtype} {list(tensor.shape)}", "float32 [rows, width]")
    return tensors


def _check_pointers(file: Path, rows: Rows, tensors: dict[str, np.ndarray]) -> None:
    """Every hidden row a row points at exists."""
    for side in ("hidden_in", "hidden_out"):
        at = rows.ints[side]
        for phase in set(rows.strings["phase"][at >= 0]):
            name, most = f"{side}.{phase}", int(at[rows.strings["phase"] == phase].max())
            height = len(tensors[name]) if name in tensors else 0
            if most >= height:
                raise damaged(file, f"{name} has {height} rows", f"at least {most + 1}, since a trace row points there")
