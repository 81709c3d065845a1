"""A process that has imported SGLang once and is copied for every engine that needs no more than that.

Six of the seven seconds of work that a boot takes on a CPU are imports. For test sessions only, which boot engines by
the dozen: see `copies`, which does the same for the processes that SGLang starts, and the test that compares the two.

Engine side: standard library only. It must not know what is imported, nor read a boot record.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...both_sides import wire

Prepared = TypeVar("Prepared")


def copied(orders: socket.socket, prepare: Callable[[dict[str, Any]], Prepared]) -> tuple[str, Prepared]:
    """Prepare once, by the first order's boot record, then copy this process for every order; returns in copies only.

    Returns the path of the socket that the copy shall connect to, and what was prepared. Whoever holds the other end
    of `orders` collects each copy when it likes, until when its exit status can be read; without them this ends.
    """
    before = dict(os.environ)
    order, _ = wire.receive(orders)
    prepared = prepare(order["boot"])
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()  # what nobody looks at is never written to, so that copies share it
    wire.send(orders, {"op": "ready"})
    while True:
        try:
            order, _ = wire.receive(orders)
        except (wire.WireClosed, OSError):
            os._exit(0)
        if order["op"] == "collect":
            os.waitpid(order["pid"], 0)
            wire.send(orders, {"op": "collected"})
        elif _fork(orders):
            _become(order, imported)
            return str(order["path"]), prepared


def _fork(orders: socket.socket) -> bool:
    """True in the copy, which leads a session of its own before anybody hears of it."""
    heard, said = os.pipe()
    pid = os.fork()
    if not pid:
        orders.close()
        os.close(heard)
        os.setsid()
        os.close(said)
        return True
    os.close(said)
    os.read(heard, 1)  # its end of the pipe is closed
    os.close(heard)
    wire.send(orders, {"op": "copied", "pid": pid})
    return False


def _become(order: Mapping[str, Any], imported: Mapping[str, str]) -> None:
    """Log, folder, environment and chance of a process of its own. imported: what was set by what was imported."""
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.chdir(order["folder"])
    wanted = {**order["environment"], **imported}
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update(wanted)
    tempfile.tempdir = None
    random.seed()
