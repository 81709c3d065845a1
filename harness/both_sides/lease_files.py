"""The lock files of leases: whoever holds a lock holds the lease, and what a file says counts only as long.

Both sides: standard library only. It must not know how much a card has, nor wait for anything.

One folder for the whole machine holds, for each card, `<uuid>.gate` (held while one process looks at the card and
decides) and `<uuid>.0`, `<uuid>.1`, … (one an engine, held for the engine's life). Blocks of ports lie beside them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gpus import CardError

FOLDER = "EAGLECHECK_LEASES"
EVERYBODYS = "/tmp/eaglecheck-leases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A live engine and its share in MiB, as its lock file says. pid: the engine host, which leads its session; or a
    process that computes its reference on the card.
    """

    uuid: str
    slot: int
    pid: int
    share: int


def holders(folder: str, uuid: str) -> tuple[Holder, ...]:
    """Every engine that holds a lease on this card now."""
    found = []
    for path in sorted(Path(folder).glob(f"{uuid}.*[0-9]")):
        lock = open_file(folder, path.name)
        try:
            if _locked(lock):
                found.append(_holder(uuid, int(path.suffix[1:]), os.pread(lock, 4096, 0)))
        finally:
            os.close(lock)
    return tuple(found)


def _holder(uuid: str, slot: int, content: bytes) -> Holder:
    """Whoever holds a slot holds it, even if the file does not say who and how much."""
    said: Any = {}
    with contextlib.suppress(ValueError):
        said = json.loads(content)
    numbers = [said.get(name) if isinstance(said, dict) else None for name in ("pid", "share")]
    pid, share = (number if isinstance(number, int) else 0 for number in numbers)
    return Holder(uuid=uuid, slot=slot, pid=pid, share=share)


def _locked(lock: int) -> bool:
    """Whether somebody holds the lock of this file; it is not kept."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def hold(folder: str, uuid: str, slot: int, *, share: int) -> int:
    """The slot's lock, held until the descriptor returned is closed. Only behind the gate, or two may want one slot."""
    lock = open_file(folder, f"{uuid}.{slot}")
    fcntl.flock(lock, fcntl.LOCK_EX)  # a reader may hold it shared for an instant, and nobody longer
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "share": share}).encode(), 0)
    return lock


@contextlib.contextmanager
def gate(folder: str, uuid: str) -> Iterator[bool]:
    """One process at a time looks and decides; False, without waiting, while another one does."""
    lock = open_file(folder, f"{uuid}.gate")
    try:
        mine = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        yield mine
    finally:
        os.close(lock)


def open_file(folder: str, name: str) -> int:
    """A lock file that every user of the machine may open; never through a link that somebody laid there."""
    path = Path(folder, name)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(0o1777)
        while True:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags)
            with contextlib.suppress(FileExistsError):
                lock = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(lock, 0o666)  # whatever the umask is
                return lock
    except OSError as error:
        raise CardError(
            f"cannot open the lock file {path}: {error.strerror}\n"
            f"  name a folder that every user of this machine can write to:  export {FOLDER}=/path"
        ) from error
