"""Temporary folders, locked by their owner; abandoned ones are removed.

It must only ever remove a folder whose owner is gone: the kernel frees its lock when it ends, however.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: How every such folder begins, and the file in it that its owner holds locked.
PREFIX, LOCK = "eaglecheck-", "owner.lock"


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A new folder of this process, in `root` or where temporary ones are; OSError where there is no room for one."""

    def __init__(self, kind: str = "", *, root: Path | None = None) -> None:
        super().__init__(prefix=f"{PREFIX}{kind}", dir=root)
        draft = Path(self.name, f"{LOCK}.part")
        self._lock = draft.open("w")  # not inherited by programs that this process starts
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(draft.with_name(LOCK))  # a folder without it is being made, and left alone

    def cleanup(self) -> None:
        super().cleanup()
        self._lock.close()


@contextlib.contextmanager
def abandoned(root: Path | None = None) -> Iterator[list[Path]]:
    """Folders in `root` whose owner is gone, by name; nobody else takes one while this block lasts."""
    found = []
    with contextlib.ExitStack() as held:
        for folder in sorted((root or Path(tempfile.gettempdir())).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError):  # no lock in it, held by its owner, or another user's
                if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                    continue
                lock = held.enter_context((folder / LOCK).open())
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(folder)
        yield found


def left_behind() -> list[Path]:
    """Folders whose owner is gone; what belongs to another user is not asked."""
    with abandoned() as found:
        return found


def remove_left_behind() -> list[Path]:
    """Remove those of `left_behind`; returns what is gone now."""
    with abandoned() as found:
        for folder in found:
            shutil.rmtree(folder, ignore_errors=True)
        return [folder for folder in found if not folder.exists()]


@functools.cache
def remove_once() -> None:
    """`remove_left_behind`, for the first engine that a process starts."""
    remove_left_behind()
