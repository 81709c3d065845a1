"""Forks SGLang's processes from one that has imported it, instead of new interpreters: a tenth of a boot's work.

A boot is mostly imports, three times over: host, scheduler, and a detokenizer that nothing is sent to while token ids
go in and out (`skip_tokenizer_init`). `serve` forks hosts; `fork_children` lets a host fork what SGLang starts. A test
compares this with SGLang's own way of starting.

Engine side: standard library only. It must not know what is imported or what a process does, nor read a boot record.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import context, popen_fork
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from ...both_sides import wire
from .processes import uncollected

Prepared = TypeVar("Prepared")

#: SGLang's process that turns tokens into text.
WITHOUT_WORK = "run_detokenizer_process"
#: SGLang's process that starts DP ranks on older releases, behind the sockets over which they get their requests.
WITH_SOCKETS = "run_data_parallel_controller_process"


def serve(
    orders: socket.socket, prepare: Callable[[dict[str, Any]], Prepared], refused: Callable[[Prepared], str]
) -> tuple[str, Prepared]:
    """Prepare once, by the first order's boot record, then fork for every order; returns in the forked only.

    Returns the path of the socket that it shall connect to, and what was prepared. Whoever holds the other end of
    `orders` collects each forked process when it likes, until when its exit status can be read; without them this ends.
    refused: why this process cannot be forked after all, which they are told; empty where it can.
    """
    before = dict(os.environ)
    order, _ = wire.receive(orders)
    with uncollected():
        prepared = prepare(order["boot"])
        # What nobody looks at is never written to, so that the forked share it. Garbage among it may stay: there is
        # little, and looking for it takes a tenth of the imports' time. Before anybody looks again, which is at once.
        gc.freeze()
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    wire.send(orders, {"op": "ready", "refused": refused(prepared)})
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
    """True in the forked process, which leads a session of its own before anybody knows of it."""
    begun, begins = os.pipe()
    pid = os.fork()
    if not pid:
        orders.close()
        os.close(begun)
        os.setsid()
        os.close(begins)
        return True
    os.close(begins)
    os.read(begun, 1)  # its end of the pipe is closed
    os.close(begun)
    wire.send(orders, {"op": "forked", "pid": pid})
    return False


def _become(order: Mapping[str, Any], imported: Mapping[str, str]) -> None:
    """Log, folder, environment and chance of a process of its own. imported: what was set by what was imported."""
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update({**order["environment"], **imported})
    tempfile.tempdir = None
    random.seed()


def fork_children(first: Callable[[], None], *, waits: bool, refused: Callable[[], str]) -> None:
    """From here on `multiprocessing.Process(…).start()` forks this process, threads left behind; `first` runs first.

    waits: nothing is sent to the process that turns tokens into text. refused: told of what keeps this process from
    being forked, which then starts its own as SGLang does. So does WITH_SOCKETS: forked from it, the first of two DP
    ranks never got a request (0.5.11), or none booted (0.5.13, 0.5.17).
    """
    spawned = context.Process._Popen

    def started(process: BaseProcess) -> Any:
        if refused():
            return spawned(process)
        target = process._target  # type: ignore[attr-defined]
        if waits and target.__name__ == WITHOUT_WORK:
            process._args, process._kwargs = (), {}  # type: ignore[attr-defined]
            target = _wait

        def run(*args: Any, **kwargs: Any) -> None:
            first()
            if target.__name__ == WITH_SOCKETS:
                context.Process._Popen = staticmethod(spawned)  # type: ignore[method-assign]
            target(*args, **kwargs)

        process._target = run  # type: ignore[attr-defined]
        return popen_fork.Popen(process)

    context.Process._Popen = staticmethod(started)  # type: ignore[assignment]


def _wait() -> None:
    while True:
        signal.pause()
