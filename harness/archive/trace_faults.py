"""Errors for trace files that cannot be used: which file, what was found, what is allowed, what to do.

It must not read anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from harness.archive.again import run_again
from harness.contract.trace import TRACE_SCHEMA
from harness.contract.usage import UserError


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
