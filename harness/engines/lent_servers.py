"""Fork servers of one process from which others have their engines forked: SGLang is imported once for all of them.

It must not boot an engine: what is forked connects to the process that asked for it, and ends with that.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from harness.both_sides import wire
from harness.engines import temporary_folders
from harness.engines.errors import EngineError
from harness.engines.fork_server import Forked, ForkServers, kind_of
from harness.engines.process import Known, Launch, Progress
from harness.engines.processes import interrupts_held

GONE = "the process that imports SGLang for all engines is gone"


@dataclass(slots=True)
class Lender:
    """Lends its servers, while it is entered, to whoever knows the `path` of its socket (`BorrowedServers`).

    path: empty where there is no place for one. Whoever boots an engine without it is told so of a socket of its own.
    """

    servers: ForkServers
    path: str = ""
    _left: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError), contextlib.ExitStack() as made:
            made.callback(self.servers.close)
            folder = made.enter_context(temporary_folders.TemporaryFolder("lender-"))
            listener = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(path := str(Path(folder, "lender.sock")))
            listener.listen()
            made.callback(_shut, listener)
            threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
            self.path, self._left = path, made.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends every server; what was forked from them lives on with whoever asked for it."""
        self._left.close()

    def _listen(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                asks, _ = listener.accept()
                threading.Thread(target=self._answer, args=(asks,), daemon=True).start()

    def _answer(self, asks: socket.socket) -> None:
        """One question; nothing happens where whoever asked is gone."""
        with asks, contextlib.suppress(OSError, wire.WireClosed):
            order, _ = wire.receive(asks)
            try:
                answer = self._answered(order)
            except EngineError as error:
                answer = {"error": str(error)}
            wire.send(asks, answer)

    def _answered(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if order["op"] == "collect":
            for server in [*self.servers.servers.values()]:
                if order["pid"] in server.hosts:
                    server.collect(order["pid"])
            return {}
        launch = _launch(order["launch"])
        match order["op"]:
            case "begin":
                self.servers.begin(launch)
                return {}
            case "server":
                return {"refused": self.servers.server(launch).refused}
        asked = self.servers.servers.get(kind_of(launch))
        if asked is None:
            raise EngineError(GONE)
        forked = list[int]()
        asked.start(
            launch, Path(order["log"]), order["path"], order["environment"], lambda host: forked.append(host.pid)
        )
        return {"pid": forked[0]}


@dataclass(slots=True)
class BorrowedServer:
    """One of a Lender's fork servers, see fork_server.ForkServer."""

    lender: BorrowedServers
    refused: str

    def start(self, launch: Launch, log: Path, path: str, environment: Mapping[str, str], known: Known) -> None:
        """A new host, see process.StartHost."""

        def forked(answer: Mapping[str, Any]) -> None:
            if "pid" in answer:
                known(Forked(answer["pid"], self))

        order = {"op": "start", "launch": _plain(launch), "log": str(log.absolute()), "path": path}
        self.lender.ask({**order, "environment": dict(environment)}, heard=forked)

    def collect(self, pid: int) -> None:
        """A host that has ended may go; nothing happens where its server is gone too."""
        with contextlib.suppress(EngineError):
            self.lender.ask({"op": "collect", "pid": pid})


@dataclass(slots=True)
class BorrowedServers:
    """A Lender's fork servers, as a process has them that knows its path; see fork_server.ForkServers."""

    path: str
    closed: bool = False
    _asking: set[socket.socket] = field(default_factory=set)

    def begin(self, launch: Launch) -> None:
        """The process that this launch's host will be forked from starts to import."""
        self.ask({"op": "begin", "launch": _plain(launch)})

    def server(self, launch: Launch, progress: Progress = lambda _text: None) -> BorrowedServer:
        """The one that this launch's host is forked from, ready for it or `refused`.

        EngineError once all were ended, or the lender is gone.
        """
        answer = self.ask({"op": "server", "launch": _plain(launch)}, progress=progress)
        return BorrowedServer(self, answer["refused"])

    def close(self) -> None:
        """Whoever waits for an answer is told that there is none."""
        self.closed = True
        for sock in self._asking.copy():
            _shut(sock)

    def ask(
        self,
        order: Mapping[str, Any],
        *,
        progress: Progress = lambda _text: None,
        heard: Callable[[Mapping[str, Any]], None] = lambda _answer: None,
    ) -> dict[str, Any]:
        """The lender's answer, EngineError where it has none. heard: told of it before any interrupt is heard."""
        start = time.monotonic()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            self._asking.add(sock)
            try:
                sock.connect(self.path)
                if self.closed and order["op"] != "collect":
                    raise EngineError("engines are forked no more: this run ends")
                wire.send(sock, dict(order))
                while not select.select([sock], [], [], 0.5)[0]:
                    progress(f"booting, imports first ({time.monotonic() - start:.0f} s)")
                with interrupts_held():
                    answer, _ = wire.receive(sock)
                    heard(answer)
            except (OSError, wire.WireClosed) as error:
                raise EngineError(f"{GONE} ({error})") from error
            finally:
                self._asking.discard(sock)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer


def _shut(sock: socket.socket) -> None:
    """Whoever waits for something on it is told that nothing comes."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _plain(launch: Launch) -> dict[str, Any]:
    """What its fork server's kind is of, and what it is found by again."""
    return {"python": str(launch.python), "pythonpath": [*map(str, launch.pythonpath)], "boot": launch.boot}


def _launch(plain: Mapping[str, Any]) -> Launch:
    return Launch(
        python=Path(plain["python"]), pythonpath=tuple(map(Path, plain["pythonpath"])), boot=dict(plain["boot"])
    )
