"""Starts and ends process groups without leaving a process, semaphore or socket file.

It must only ever touch processes of the group it is given, by their ids.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

#: How long Python's resource trackers may take to unlink what their dead processes held.
TRACKER_SECONDS = 3.0
SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Signals whose handlers raise (Ctrl-C) are delivered only at the end of this block: nobody could clean up in it.

    None is lost. Between a fork and the assignment of its process, for example, nobody could end that process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(one))]
    try:
        with handled(numbers, lambda got, _frame: held.append(got)):
            yield
    finally:
        for late in held:
            signal.raise_signal(late)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Signals with another handler, for as long as this block runs."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def abort_group(group: int) -> None:
    """Abort every process of the group; with PYTHONFAULTHANDLER set, each first writes where its threads are."""
    for process in _members(group):
        with contextlib.suppress(psutil.Error):
            process.rlimit(psutil.RLIMIT_CORE, (0, 0))
            process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + TRACKER_SECONDS
    while _members(group) and time.monotonic() < deadline:
        time.sleep(0.02)


def end_group(group: int) -> None:
    """Kill every process of the group; resource trackers last, after they cleaned up behind the others.

    A tracker unlinks shared semaphores once all its processes are gone, and is gone itself then.
    """
    processes = _members(group)
    memory = _own_memory(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if not any("multiprocessing.resource_tracker" in word for word in process.cmdline()):
                process.kill()
    deadline = time.monotonic() + TRACKER_SECONDS
    while _members(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for path in memory:
        path.unlink(missing_ok=True)


def _members(group: int) -> list[psutil.Process]:
    """Every live process of the group."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(pid) == group:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def _own_memory(processes: list[psutil.Process]) -> set[Path]:
    """Shared memory files these processes map and made: SGLang unlinks its own only when it may leave in peace.

    A file that was there before them is somebody else's.
    """
    found = set()
    born = min((process.create_time() for process in processes), default=0.0)
    for process in processes:
        with contextlib.suppress(OSError):
            for path in _mapped(process.pid):
                if path.parent == SHARED_MEMORY and path.exists() and path.stat().st_ctime >= born:
                    found.add(path)
    return found


def _mapped(pid: int) -> Iterator[Path]:
    """The files that a process maps. psutil would also have the kernel count the pages of each, a third of a second."""
    for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
        if len(parts := line.split(maxsplit=5)) == 6:  # address, access, offset, device, inode, and the path, if any
            yield Path(os.fsdecode(parts[5]))
