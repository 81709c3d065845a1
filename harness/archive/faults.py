"""What is wrong with a run folder: with what lies in it, or with the place where it is to be written.

Each error says what was found, what is allowed and what to do. This module must not read what a folder holds.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from harness.archive.again import run_again
from harness.contract.trace import TRACE_SCHEMA
from harness.contract.usage import UserError

#: What a system says when a disk takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT)


class StoreError(UserError):
    """A folder that cannot be written or read; the text is meant for people."""


class NotThere(StoreError):
    """No folder where one was looked for. wrong: what was asked for; instead: the nearest that is there."""

    def __init__(self, text: str, *, wrong: Path, instead: Path | None) -> None:
        super().__init__(text)
        self.wrong, self.instead = wrong, instead


class UnreadableError(StoreError):
    """A file of a folder of ours that is missing, damaged or newer: nothing is said of what it was part of."""

    exit_code = 3

    def __init__(self, text: str) -> None:
        super().__init__(f"verdict UNKNOWN: {text}")


class DamagedError(UnreadableError):
    """A file that is not whole JSON."""


class WriteError(StoreError):
    """The place where a run is kept takes no more (full disk, folder gone): nothing can be said about the engine."""

    exit_code = 3


@contextlib.contextmanager
def readable_errors(folder: Path, *, kept: str, instead: Callable[[], str]) -> Iterator[None]:
    """WriteError for what cannot be written. kept: what is left; instead: what to type where there is room."""
    try:
        with room(folder, kept=kept):
            yield
    except OSError as error:
        raise WriteError(f"cannot write to {folder}: {error.strerror}\n  {kept}\n  {instead()}") from error


@contextlib.contextmanager
def room(folder: Path, *, kept: str) -> Iterator[None]:
    """WriteError where the folder's disk is full; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        place = next(path for path in (folder, *folder.parents) if path.exists())
        raise WriteError(
            f"the disk is full: cannot write to {folder}, {shutil.disk_usage(place).free} bytes free\n"
            f"  {kept}\n  see what is large:  du -sh {folder.parent}/* | sort -h"
        ) from error


def home_room(folder: Path) -> contextlib.AbstractContextManager[None]:
    """`room` for a folder below EAGLECHECK_HOME, with what to do there."""
    return room(folder, kept="choose another place:  export EAGLECHECK_HOME=/path/with/space")


class TraceError(UserError):
    """A trace file that cannot be used, so nothing is known of its scenario; the text is meant for people."""

    exit_code: ClassVar[int] = 3

    def __init__(self, file: Path, *, found: str, allowed: str, do: str) -> None:
        super().__init__(
            f"verdict UNKNOWN: cannot read trace file {file}\n  found: {found}\n  allowed: {allowed}\n  {do}"
        )
        self.file = file


def check_version(file: Path, found: int) -> None:
    if not 1 <= found <= TRACE_SCHEMA:
        newer = found > TRACE_SCHEMA
        raise TraceError(
            file,
            found=f"trace version {found}",
            allowed=f"trace version 1 to {TRACE_SCHEMA}",
            do="a newer eaglecheck wrote it: update this one"
            if newer
            else f"an old eaglecheck wrote it: {run_again_in(folder_of(file))}",
        )


def run_again_in(folder: Path) -> str:
    return f"run again:  {run_again(folder)}"


def damaged(file: Path, found: str, allowed: str) -> TraceError:
    return TraceError(
        file, found=found, allowed=allowed, do=f"the file is damaged or not ours: {run_again_in(folder_of(file))}"
    )


def folder_of(file: Path) -> Path:
    """The scenario's folder that a trace file is in."""
    return file.parent.parent if file.parent.name == "tensors" else file.parent
