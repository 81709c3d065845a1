"""Folders that an option names for what is written: the folder itself is made, and nothing above it.

A parent that is missing is a slip of the hand more often than a wish, and files (`harness.cli.documents`) are treated
alike. It must not know what is written.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from harness.contract.usage import UsageError


def check_folder(folder: Path, *, option: str, what: str) -> None:
    """UsageError for a folder that could not be made or used as it is; nothing is made. what: goes into it."""
    if folder.is_dir():
        return
    if os.path.lexists(folder):
        raise _refusal(folder, "it is a file" if folder.is_file() else "it is no folder", option=option, what=what)
    if not folder.parent.is_dir():
        there = folder.parent.exists() or any(part.is_file() for part in folder.parents)
        why = "Not a directory" if there else f"there is no folder {folder.parent}"
        raise _refusal(folder, why, option=option, what=what)


def writable(folder: Path, *, option: str, what: str) -> Path:
    """The folder, made if need be; UsageError if nothing can be written into it."""
    check_folder(folder, option=option, what=what)
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _refusal(folder, str(error.strerror), option=option, what=what) from error
    return folder


def _refusal(folder: Path, why: str, *, option: str, what: str) -> UsageError:
    return UsageError(f"{what} cannot be written to {folder}: {why}\n  name another folder:  --{option} FOLDER")
