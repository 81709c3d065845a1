"""Temporary folders of engines, each with its owner written inside, so that those of dead owners can be removed.

It must only ever remove a folder whose owner is known to be gone, by the owner's process id and start time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

#: How every such folder begins, and the file in it that says whose it is.
PREFIX, OWNER = "eaglecheck-", "owner.json"
#: Start times are told in hundredths of a second, and not always rounded alike.
SAME_SECONDS = 0.5


def make(kind: str = "") -> tempfile.TemporaryDirectory[str]:
    """A new folder of this process; OSError where there is no room for one."""
    folder = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{kind}")
    Path(folder.name, OWNER).write_text(json.dumps(_me()))
    return folder


def _me() -> dict[str, object]:
    return {"pid": os.getpid(), "started": psutil.Process().create_time(), **_where()}


def _where() -> dict[str, str]:
    """What a process id means something in: this start of this machine, and this container."""
    found = {"boot": "", "pids": ""}
    with contextlib.suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["pids"] = os.readlink("/proc/self/ns/pid")
    return found


def left_behind(root: Path | None = None) -> list[Path]:
    """Folders whose owner is gone, oldest name first; what belongs to another user or container is not asked."""
    return [folder for folder in _folders(root) if _is_dead(folder)]


def _folders(root: Path | None) -> Iterator[Path]:
    for folder in sorted((root or Path(tempfile.gettempdir())).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                yield folder


def _is_dead(folder: Path) -> bool:
    try:
        owner = json.loads((folder / OWNER).read_bytes())
        pid, started = int(owner["pid"]), float(owner["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # of before owners were written, or being made this moment
    if any(owner.get(name) != value or not value for name, value in _where().items()):
        return False
    try:
        return bool(abs(psutil.Process(pid).create_time() - started) > SAME_SECONDS)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def remove_left_behind(root: Path | None = None) -> list[Path]:
    """Remove those of `left_behind`; returns what is gone now."""
    found = left_behind(root)
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder for folder in found if not folder.exists()]


@functools.cache
def remove_once() -> None:
    """`remove_left_behind`, for the first engine that a process starts."""
    remove_left_behind()
