"""Folders below EAGLECHECK_HOME, some of which several processes may want at once, to fill them with the same bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.archive.faults import room


def made_once(place: Path, fill: Callable[[Path], None]) -> Path:
    """`place`, filled by `fill` if it is absent; it appears by one rename, whole. WriteError where the disk is full."""
    if place.exists():
        return place
    with contextlib.ExitStack() as ended, disk(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        ended.callback(shutil.rmtree, work, ignore_errors=True)
        try:
            fill(work)
            work.chmod(0o755)  # mkdtemp is private; an engine may run as another user
            os.rename(work, place)
        except OSError:
            if not place.exists():  # else another process was first
                raise
    return place


def disk(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turn a full disk below EAGLECHECK_HOME into a message that names the folder and says what to do."""
    return room(folder, kept="choose another place:  export EAGLECHECK_HOME=/path/with/space")
