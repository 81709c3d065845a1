"""Receives from several scheduler ranks at once: which failed first, which is behind.

Control side; it must never import sglang, and must not know what the messages mean beyond that.
"""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from harness.both_sides import wire
from harness.contract.types import Phase
from harness.engines.errors import Frame

#: Seconds for a rank to say where it is, and for the others to fall after the first did.
ANSWER_SECONDS = 5.0
GRACE_SECONDS = 1.0
#: Seconds between the first rank's answer and the last's: they run a scheduler step together.
LAG_SECONDS = 30.0

_ORDER = [str(phase) for phase in Phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """In place of a message: the rank closed its socket without a word; when: seconds of the monotonic clock."""

    when: float


def gather(socks: list[socket.socket], *, seconds: float) -> list[Frame | Gone | None]:
    """One message of each socket in order; None where none came within `seconds`.

    Where one rank fell, the others wait for it for ever inside a collective: so then only for GRACE_SECONDS more. The
    same where one says that something of ours failed.
    """
    found: list[Frame | Gone | None] = [None] * len(socks)
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for index, sock in enumerate(socks):
            selector.register(sock, selectors.EVENT_READ, index)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(timeout=left):
                frame = found[key.data] = _read(socks[key.data], seconds=max(left, ANSWER_SECONDS))
                selector.unregister(socks[key.data])
                if frame is not None:
                    ends = _fell(frame) or (isinstance(frame, tuple) and frame[0]["op"] == "error")
                    deadline = min(deadline, time.monotonic() + (GRACE_SECONDS if ends else LAG_SECONDS))
    return found


def _read(sock: socket.socket, *, seconds: float) -> Frame | Gone | None:
    sock.settimeout(seconds)
    try:
        return wire.receive(sock)
    except wire.WireClosed:
        return Gone(when=time.monotonic())
    except TimeoutError:
        return None


def _fell(frame: Frame | Gone | None) -> bool:
    return isinstance(frame, Gone) or (frame is not None and frame[0]["op"] == "crashed")


def first_to_fall(found: list[Frame | Gone | None]) -> int | None:
    """The rank that fell first. SGLang kills all of them after the first crash, so those fall without a word, later."""
    fallen = [index for index, frame in enumerate(found) if _fell(frame)]

    def when(index: int) -> float:
        frame = found[index]
        if isinstance(frame, Gone):
            return frame.when
        return float(frame[0].get("when", 0.0)) if frame is not None else 0.0

    return min(fallen, key=when, default=None)


def ask(sock: socket.socket | None) -> dict[str, Any]:
    """Where a rank is, from its watchdog; empty if that does not answer."""
    if sock is None:
        return {}
    try:
        sock.settimeout(ANSWER_SECONDS)
        wire.send(sock, {"op": "where"})
        answer, _ = wire.receive(sock)
    except (wire.WireClosed, OSError):
        return {}
    return {name: value for name, value in answer.items() if name != "op"}


def progress(where: dict[str, Any]) -> tuple[int, int, int]:
    """How far a rank had come: round, phase, step. The one that is behind holds the others."""
    phase = str(where.get("at_phase", ""))
    order = _ORDER.index(phase) if phase in _ORDER else -1
    return int(where.get("at_round", -1)), order, int(where.get("at_step", 0))
