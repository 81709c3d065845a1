"""Folders that several processes may want at once, each of which would fill it with the same bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.archive.faults import home_room


def made_once(place: Path, fill: Callable[[Path], None]) -> Path:
    """`place`, filled by `fill` if it is absent; it appears by one rename, whole. WriteError where the disk is full."""
    if place.exists():
        return place
    with contextlib.ExitStack() as ended, home_room(place.parent):
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
