"""Ports that one engine takes and no other engine gets: a block of them behind a lock, as long as the engine lives.

SGLang looks for free ports and binds them seconds later, so that two engines which boot at the same time may find the
same ones. Here each engine has a block of its own, outside the range from which the system gives ports to connections.

Both sides: standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lease_files import EVERYBODYS, FOLDER, open_file

#: With DP attention SGLang takes the ports from `port` + 233 on: eleven with eight ranks. The store of the ranks
#: (`nccl_port`) and the queues between them, searched from SGLANG_PORT on, lie behind those.
SGLANG_PORT_DELTA, STORE, QUEUES, PORTS = 233, 16, 20, 32
FIRST_PORT, LAST_PORT = 20000, 50000
CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """PORTS ports from `first` on, ours as long as `lock` is open in this process or in one forked from it."""

    first: int
    lock: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `sglang.Engine`, which counts from them."""
        return {"port": self.first - SGLANG_PORT_DELTA, "nccl_port": self.first + STORE}

    @property
    def environment(self) -> dict[str, str]:
        return {"SGLANG_PORT": str(self.first + QUEUES)}


def take_ports() -> Ports:
    """The first block that nobody holds and in which every port is free; each process begins at a place of its own."""
    blocks = list(range(FIRST_PORT, _end() - PORTS + 1, PORTS))
    begin = os.getpid() % len(blocks)
    for first in blocks[begin:] + blocks[:begin]:
        lock = open_file(os.environ.get(FOLDER) or EVERYBODYS, f"ports-{first}")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if all(map(_is_free, range(first, first + PORTS))):
                return Ports(first=first, lock=lock)
        except BlockingIOError:
            pass
        os.close(lock)
    raise RuntimeError(f"no {PORTS} ports in a row are free between {FIRST_PORT} and {_end()}")


@contextlib.contextmanager
def ports_held() -> Iterator[Ports]:
    """A block for as long as the context lasts."""
    ports = take_ports()
    try:
        yield ports
    finally:
        os.close(ports.lock)


def _end() -> int:
    """The port behind the last usable one: connections take theirs from there, unless that leaves no hundred blocks."""
    try:
        connections = int(CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST_PORT
    return min(connections, LAST_PORT) if connections >= FIRST_PORT + 100 * PORTS else LAST_PORT


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
