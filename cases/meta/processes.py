"""Whether an engine's processes are still there. A zombie is not: it only waits for its parent to look.

It must not end any process itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """The process and everything below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def survivors(processes: Iterable[psutil.Process], *, within: float = 5.0) -> list[str]:
    """Those that still run after so many seconds, in words; usually none, and then at once."""
    deadline = time.monotonic() + within
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [str(process) for process in left]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
