"""What processes have come to, and whether they are still there. A zombie is not: it only waits for its parent to look.

It must not end any process itself. A wait is for what comes at once on an idle machine, and late on a busy one.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

#: Longer than any machine needs, and shorter than the limit of a test.
LONG = 300.0
Found = TypeVar("Found")


def wait_until(ready: Callable[[], Found], *, process: subprocess.Popen[str] | None = None) -> Found:
    """What `ready` returns once that is true. AssertionError if the process that brings it about ends before."""
    deadline = time.monotonic() + LONG
    while not (found := ready()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.05)
    return found


def tree(pid: int) -> list[psutil.Process]:
    """The process and everything below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def survivors(processes: Iterable[psutil.Process]) -> list[str]:
    """Those that do not end, in words; usually none, and then at once."""
    deadline = time.monotonic() + 60.0
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [str(process) for process in left]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
