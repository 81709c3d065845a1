"""Readable errors for what cannot be written."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.archive.store import WriteError

#: What a system says when a disk takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def readable_errors(folder: Path, *, kept: str, instead: Callable[[], str]) -> Iterator[None]:
    """WriteError for what cannot be written. kept: what is left; instead: what to type where there is room."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise WriteError(f"cannot write to {folder}: {error.strerror}\n  {kept}\n  {instead()}") from error
        place = next(path for path in (folder, *folder.parents) if path.exists())
        raise WriteError(
            f"the disk is full: cannot write to {folder}, {shutil.disk_usage(place).free} bytes free\n"
            f"  {kept}\n  see what is large:  du -sh {folder.parent}/* | sort -h"
        ) from error
