"""Says where a rank is while its loop is stuck: a thread of the scheduler's process that answers on its own socket.

Engine side: standard library only. It must not touch what the scheduler works on; it only looks.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import types
from typing import Any

from ...both_sides import wire
from ..probes.recorder import Recorder


class Watchdog:
    """One thread; `start` says hello to the control side and returns."""

    def __init__(self, sock: socket.socket, recorder: Recorder, *, ranks: tuple[int, int]) -> None:
        self._sock, self._recorder, self._ranks = sock, recorder, ranks
        self._watched = threading.get_ident()

    def start(self) -> None:
        hello = {"op": "hello", "role": "watchdog", "pid": os.getpid()}
        wire.send(self._sock, hello | {"dp_rank": self._ranks[0], "tp_rank": self._ranks[1]})
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                wire.receive(self._sock)
                wire.send(self._sock, {"op": "here", **self._where()})
            except (wire.WireClosed, OSError):
                return

    def _where(self) -> dict[str, Any]:
        """The innermost SGLang function, and what the probe saw last."""
        frame: types.FrameType | None = sys._current_frames().get(self._watched)
        site = "unknown"
        while frame is not None:
            name = frame.f_code.co_filename
            if "/sglang/" in name:
                site = f"{name.split('/sglang/')[-1]}:{frame.f_code.co_name}"
                break
            frame = frame.f_back
        current = self._recorder.round
        entered = {} if current is None else {"forwards": dict(current.forwards)}
        return {**entered, "site": site, **{f"at_{key}": value for key, value in list(self._recorder.last.items())}}
