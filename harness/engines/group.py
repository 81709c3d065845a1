"""Ends a process group that we started, so that nothing of it is left: no process, no semaphore, no socket file.

It must only ever touch processes of the group it is given, by their ids.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

#: How long Python's resource trackers may take to unlink what their dead processes held.
TRACKER_SECONDS = 3.0
SHARED_MEMORY = Path("/dev/shm")


def members(group: int) -> list[psutil.Process]:
    """Every live process of the group."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(pid) == group:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def end_group(group: int) -> None:
    """Kill every process of the group; resource trackers last, after they cleaned up behind the others.

    A tracker unlinks shared semaphores once all its processes are gone, and is gone itself then.
    """
    processes = members(group)
    memory = _own_memory(processes)
    for process in processes:
        if not _is_tracker(process):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    deadline = time.monotonic() + TRACKER_SECONDS
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for path in memory:
        path.unlink(missing_ok=True)


def _own_memory(processes: list[psutil.Process]) -> set[Path]:
    """Shared memory files these processes map and made: SGLang unlinks its own only when it may leave in peace."""
    found = set()
    born = min((process.create_time() for process in processes), default=0.0)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            paths = [Path(mapped.path) for mapped in process.memory_maps()]
            found |= {path for path in paths if path.parent == SHARED_MEMORY and _younger(path, born)}
    return found


def _younger(path: Path, moment: float) -> bool:
    """Whether the file was made after `moment`: a file that was there before is somebody else's."""
    with contextlib.suppress(OSError):
        return path.stat().st_ctime >= moment
    return False


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False
