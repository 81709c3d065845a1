"""What every process of an engine does first: it ends with its parent, and it finds its way back to the control side.

Engine side: standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

_PR_SET_PDEATHSIG = 1
#: Room for a round of a wide model, so that a scheduler need not wait until it is read; the system may give less.
SEND_BYTES = 8 << 20
ENV_SOCKET = "EAGLECHECK_ENGINE_SOCKET"
ENV_BOOT = "EAGLECHECK_ENGINE_BOOT"
ENV_PARENT = "EAGLECHECK_ENGINE_PARENT"


def die_with_parent() -> None:
    """Be killed when the parent ends, which each of our processes names to its children, and at once if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[ENV_PARENT]):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[ENV_PARENT] = str(os.getpid())


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports, which leave hardly any garbage: a third of their time Python would look for some."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def uncollected_until_run() -> None:
    """The same for a process that was spawned, until its imports are done and what it was started for begins."""
    gc.disable()
    run = BaseProcess.run

    def collected(process: BaseProcess) -> None:
        gc.enable()
        run(process)

    BaseProcess.run = collected  # type: ignore[method-assign, assignment]


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    sock.connect(path)
    return sock
