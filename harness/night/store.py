"""Nights on disk: NIGHTS/<utc>-<short id>/ with plan.json first and night.json last, whole or not at all.

Between the two a line of cells.jsonl for each cell that is done, so that a night that was cut off can go on. A folder
without night.json is a night that never finished. This module must not judge.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import BaseModel

from harness.archive import run_folders
from harness.archive.faults import StoreError, WriteError, readable_errors
from harness.contract import plain_files
from harness.contract.json_files import BadDocument, parsed, validated
from harness.night.records import SCHEMA, CellResult, Night, NightPlan

PLAN, CELLS, NIGHT = run_folders.PLAN, "cells.jsonl", "night.json"
UNFINISHED = f"the night has no {NIGHT}: it is incomplete, red, and no baseline"
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One folder of a store. night is None where it never finished."""

    folder: Path
    plan: NightPlan
    night: Night | None


def new_id() -> str:
    """A name that sorts by time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def begin(root: Path, plan: NightPlan, *, again: bool = False) -> Path:
    """The folder of a night that starts now, its plan in it. again: it may be there. Raises WriteError."""
    folder = root / plan.id
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=again)
    _write(folder / PLAN, plan)
    return folder


def hold(folder: Path) -> BinaryIO:
    """Keep others from driving this night, until what comes back is closed or this process ends, however it does.

    StoreError where another process drives it; WriteError.
    """
    with disk(folder):
        held = (folder / CELLS).open("ab")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise StoreError(
            f"the night {folder.name} is being driven by another process\n"
            "  wait until that ends; what it leaves can be driven then, by the same command"
        ) from error
    except OSError:
        pass  # a file system without locks
    return held


def driven(folder: Path) -> bool:
    """Whether a process that still lives drives this night."""
    if not (folder / CELLS).exists():
        return False
    try:
        hold(folder).close()
    except StoreError:
        return True
    except WriteError:
        return False
    return False


def add(folder: Path, cell: CellResult) -> None:
    """Keep a cell that is done. Raises WriteError."""
    with disk(folder), (folder / CELLS).open("ab") as file:
        file.write((cell.model_dump_json() + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def done(folder: Path) -> dict[str, CellResult]:
    """The cells that an unfinished night has kept, by key; not a last line that was cut off. StoreError if damaged."""
    file = folder / CELLS
    try:
        *lines, _cut_off = plain_files.content(file).split(b"\n") if file.exists() else [b""]
        cells = [validated(parsed(line), CellResult) for line in lines]
    except (OSError, BadDocument) as error:
        raise StoreError(f"{file} cannot be read: {error}\n  move {folder} away, and begin anew") from error
    return {cell.key: cell for cell in cells}


def finish(folder: Path, night: Night) -> Path:
    """Write night.json, whole or not at all; again, once it is judged. Raises WriteError."""
    _write(folder / NIGHT, night)
    (folder / CELLS).unlink(missing_ok=True)
    return folder / NIGHT


def read(folder: Path) -> Kept:
    """One night or shard. StoreError for a folder that is none, is damaged, or was written by another version."""
    if not (folder / PLAN).exists():
        raise StoreError(
            f"{folder} is not a night: it has no {PLAN}\n"
            f"  make one:  eaglecheck matrix --nights {folder.parent} --engines 0.5.23 --cases pr25015"
        )
    plan = _read(folder / PLAN, NightPlan)
    ended = os.path.lexists(folder / NIGHT)
    return Kept(folder=folder, plan=plan, night=_read(folder / NIGHT, Night) if ended else None)


def with_what_is_left(cell: CellResult, folder: Path) -> CellResult:
    """The cell without the names of reproducers that are gone from its night: nobody can run those again."""
    seen = (
        one if one.reproducer and (folder / one.reproducer).is_dir() else one.model_copy(update={"reproducer": None})
        for one in cell.findings
    )
    return cell.model_copy(update={"findings": tuple(seen)})


def nights(root: Path) -> list[Kept]:
    """Every night in a store, oldest first."""
    return sorted((read(path.parent) for path in root.glob(f"*/{PLAN}")), key=lambda kept: kept.plan.created)


def judged(kept: Iterable[Kept]) -> list[Night]:
    """Those of these nights that were judged, in their order."""
    return [one.night for one in kept if one.night is not None and one.night.judged is not None]


def parts(folder: Path) -> list[Path]:
    """The nights at or below a folder, as artifacts unpack: PART itself, PART/<id>, or one level more."""
    if (folder / PLAN).exists():
        return [folder]
    found = [*folder.glob(f"*/{PLAN}"), *folder.glob(f"*/*/{PLAN}")]
    return sorted(path.parent for path in found)


def torn(folder: Path, *, deep: bool = True) -> list[Path]:
    """Folders at the places of `parts` (deep False: of `nights`) that hold a night without its plan."""
    inside = [*folder.glob(f"*/{NIGHT}")]
    found = [folder / NIGHT, *inside, *folder.glob(f"*/*/{NIGHT}")] if deep else inside
    return sorted(path.parent for path in found if not path.with_name(PLAN).exists() and path.exists())


def _write(path: Path, model: BaseModel) -> None:
    with disk(path.parent, kept=f"{path} stays as it is" if path.exists() else UNFINISHED):
        plain_files.replace(path, (model.model_dump_json(indent=1) + "\n").encode(), sync=True)


def _read(path: Path, model: type[Model]) -> Model:
    try:
        return validated(parsed(plain_files.content(path)), model)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}\n  allowed: a night of `eaglecheck matrix`") from error
    except BadDocument as error:
        raise StoreError(
            f"{path} is damaged, or not of schema {SCHEMA}: {error}\n"
            "  it counts for nothing until it is repaired; move it away to go on without it"
        ) from error


def disk(folder: Path, *, kept: str = UNFINISHED) -> contextlib.AbstractContextManager[None]:
    """Turn a full disk into a message that says what is kept and what to do."""
    return readable_errors(folder, kept=kept, instead=lambda: "choose another place:  --nights FOLDER")
