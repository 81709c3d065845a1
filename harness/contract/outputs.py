"""Checks that output files and folders can be written, before anything slow starts.

The last part of a path may be new, and nothing above it is made: a parent that is missing is more often a typo than a
wish. It must not know what is written.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.contract import plain_files
from harness.contract.usage import UserError

#: Bytes of a name at most, on every file system that engines are installed on.
LONGEST = 255
#: As long as what lies below a folder of runs or nights, in names as short as that.
BELOW = os.path.join(*["x" * 50] * 5)
#: How long whoever reads a named pipe may take to open it.
READER_SECONDS = 5.0


class OutputError(UserError):
    """An option names a place that cannot be written to."""


class WriteFailed(OutputError):
    """A place took no more when it came to writing: what was found is only on the terminal."""

    exit_code = 3


def check_target(
    target: str | Path | None,
    *,
    option: str = "json",
    inputs: Iterable[Path | None] = (),
    runs: Iterable[Path | None] = (),
    beside: Path | None = None,
    piped: bool = True,
) -> None:
    """OutputError if `write_text` could not write there.

    inputs: files that the command reads, kept as they are; runs: the same of folders, with all that is in them.
    beside: the folder that the command will make for its runs. piped: whether '-' is standard output to it.
    """
    if target is None or (piped and str(target) == "-"):
        return
    check_named(target, option=option)
    path = Path(target)
    check_outside(path, runs, option=option)
    if any(one is not None and one.exists() and path.exists() and path.samefile(one) for one in inputs):
        raise OutputError(cannot_write(path, "the command reads it", option))
    if path.is_dir() or (beside is not None and path.resolve() == beside.resolve()):
        raise OutputError(cannot_write(path, "it is a folder", option))
    if not path.parent.is_dir():
        raise OutputError(cannot_write(path, f"there is no folder {path.parent}", option))
    if path.exists() and not path.is_file():
        return  # a device or a pipe: opening it now could block or be seen
    part = plain_files.draft_of(path)
    try:  # asking for permission is not enough: root may always, and some file systems still refuse
        part.touch()
        part.unlink()
    except OSError as error:
        raise OutputError(cannot_write(path, error.strerror or "it may not be written", option)) from error


def write_json(document: dict[str, Any], target: str | None) -> None:
    """As `write_text`; nothing for None."""
    if target is not None:
        write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", target)


def write_text(text: str, target: str, *, option: str = "json") -> None:
    """To a file, whole or not at all, or to standard output for '-'; WriteFailed if that fails after all."""
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target)
    try:
        if path.exists() and not path.is_file():
            _pour(text, path)  # a device or a pipe, which must not be replaced by a file
            return
        plain_files.replace(path, text.encode())
    except OSError as error:
        raise WriteFailed(cannot_write(path, str(error.strerror), option)) from error


def _pour(text: str, path: Path) -> None:
    """Into what is there. OSError for a named pipe that nobody reads within seconds: to open it would wait for ever."""
    ends = time.monotonic() + READER_SECONDS
    while True:
        try:
            opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not path.is_fifo():
                raise
            if time.monotonic() > ends:
                raise OSError(error.errno, "nobody reads this named pipe") from error
            time.sleep(0.05)
    os.set_blocking(opened, True)
    with open(opened, "w", encoding="utf-8") as file:
        file.write(text)


def check_outside(path: Path, runs: Iterable[Path | None], *, option: str) -> None:
    """OutputError for a place in a folder that the command reads: its own files must stay what they are."""
    for run in runs:
        if run is not None and path.resolve().is_relative_to(run.resolve()):
            raise OutputError(f"--{option} {path} is inside the run itself\n  name a place outside {run}")


#: Options of folders that are made with those above them.
MADE = ("runs", "nights")


def unusable(path: str) -> str:
    """Why a path can be neither read nor made, in a line, or nothing; one that is not there yet may be made."""
    try:
        path.encode()  # what is kept of a run is text
        os.stat(os.path.join(path, BELOW))
    except (FileNotFoundError, NotADirectoryError):  # what to do about these depends on what the path is for
        pass
    except OSError as error:
        return str(error.strerror)
    except UnicodeEncodeError:
        return "it is not UTF-8"
    except ValueError:
        return "it holds a NUL"
    if any(len(os.fsencode(name)) > LONGEST for name in path.split(os.sep)):  # below a folder that is not there yet
        return os.strerror(errno.ENAMETOOLONG)
    locked = os.path.isdir(path) and not os.access(path, os.R_OK, effective_ids=True)
    return os.strerror(errno.EACCES) if locked else ""


def check_named(place: str | Path, *, option: str) -> None:
    """OutputError for what is `unusable`, and for '-', where standard output may be meant and cannot be had."""
    if str(place) == "-":
        raise OutputError(f"--{option} -: not written to standard output\n  name a place on disk:  --{option} PATH")
    if why := unusable(str(place)):
        raise OutputError(cannot_write(Path(place), why, option))


def check_folder(folder: Path, *, option: str) -> None:
    """OutputError for a folder that could not be made or used as it is; nothing is made."""
    check_named(folder, option=option)
    if folder.is_dir():
        return
    if os.path.lexists(folder):
        raise OutputError(cannot_write(folder, "it is a file" if folder.is_file() else "it is not a folder", option))
    if any(os.path.lexists(part) and not part.is_dir() for part in folder.parents):
        raise OutputError(cannot_write(folder, "Not a directory", option))
    if option not in MADE and not folder.parent.is_dir():
        raise OutputError(cannot_write(folder, f"there is no folder {folder.parent}", option))


def writable(folder: Path, *, option: str = "runs") -> Path:
    """The folder; OutputError if nothing could be written into it.

    Nothing is made, since a command that is refused leaves nothing behind: of a folder that is not there yet, the
    nearest above it is tried.
    """
    check_folder(folder, option=option)
    there = next(part for part in (folder, *folder.absolute().parents) if part.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OutputError(cannot_write(folder, str(error.strerror), option)) from error
    return folder


def cannot_write(path: Path, why: str, option: str) -> str:
    """The text of an error: where, why, and what to type instead."""
    return f"cannot write to {path}: {why}\n  name another place:  --{option} PATH"
