"""Hosts forked from a process that has SGLang imported already, instead of started anew: a tenth of a boot's work.

It must never import sglang, and must not decide which engine is needed when.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from harness.both_sides import wire
from harness.engines import process, temporary_folders
from harness.engines.errors import EngineError
from harness.engines.exits import exit_code
from harness.engines.process import REVERT, Known, Launch, Progress, environment_of
from harness.engines.processes import end_group, interrupts_held

#: Of a boot record: what is not looked at before everything is imported; and what only patches for a CPU look at.
LATER = (
    *("arguments", "optional_arguments", "server_args", "probe", "flags", "mutants_in_graphs", "mutable", "mutated"),
    *("executed", "lease", "eos_token_ids", "variables", "revert"),
)
OF_CPU = ("overlap", "layered", "assumed", "cpu_attention", "lora", "host_cache")


def kind_of(launch: Launch) -> str:
    """Launches of one kind import the same, in the same environment and with the same patches."""
    patched = launch.boot.get("device") != "cuda" or launch.boot.get("plugin")
    left_out = LATER if patched else (*LATER, *OF_CPU)
    boot = {name: value for name, value in launch.boot.items() if name not in left_out}
    boot["environment"] = {name: value for name, value in boot.get("environment", {}).items() if name != REVERT}
    return json.dumps([str(launch.python), *map(str, launch.pythonpath), boot], sort_keys=True)


def can_fork(launch: Launch) -> bool:
    """Not what differs from engine to engine before the imports: where two sides meet."""
    return bool(launch.boot.get("forked")) and launch.boot.get("handoff") is None


class Collects(Protocol):
    """Lets a host that has ended go."""

    def collect(self, pid: int) -> None: ...


@dataclass(slots=True)
class Forked:
    """A host that is the fork server's child and not ours; see process.Started."""

    pid: int
    server: Collects
    returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status; it can still be read by others afterwards, until `wait`."""
        if self.returncode is None:
            self.returncode = exit_code(self.pid)
            if self.returncode is None and not Path(f"/proc/{self.pid}").exists():
                self.returncode = -signal.SIGKILL  # its server is gone, and nobody knows
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Its exit status, once it has ended; subprocess.TimeoutExpired if it does not."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"forked host {self.pid}", timeout)
            time.sleep(0.005)
        self.server.collect(self.pid)
        return code


@dataclass(slots=True)
class ForkServer:
    """The process that is forked: `ready`, then `start` as often as wanted. EngineError where it cannot be had.

    refused: why it cannot be forked although it is there; empty where it can. Any thread may ask it.
    """

    launch: Launch
    log: Path
    refused: str = ""
    #: processes that were forked and not collected yet
    hosts: set[int] = field(default_factory=set)
    #: launches that it was chosen for and that were not forked yet
    awaited: list[Launch] = field(default_factory=list)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    #: of whoever asks whether it is ready: the others wait as long
    _readying: threading.Lock = field(default_factory=threading.Lock)
    _process: subprocess.Popen[bytes] | None = None
    #: it was told to import and has not answered yet
    _imports: bool = False
    _orders: socket.socket | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def needed(self) -> bool:
        """Whether something lives that was forked from it, or is about to be."""
        return bool(self.hosts or self.awaited or self._imports)

    @property
    def died(self) -> bool:
        """Whether it has ended of itself, or somebody has ended it, once it had imported everything."""
        return self._process is not None and not self._imports and self._process.poll() is not None

    def begin(self) -> None:
        """Start it, unless it was before: it imports, and `ready` waits for that."""
        if self._process is None:
            with self._named():
                wire.send(self._start(), {"op": "prepare", "boot": self.launch.boot})
            self._imports = True

    def ready(self, progress: Progress = lambda _text: None) -> None:
        """Start it, unless it was before, and wait until it has imported everything."""
        with self._readying:
            self.begin()
            if self._imports:
                self._imports = False
                with self._named():
                    self.refused = str(self._ask(None, progress)["refused"])

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, wire.WireClosed) as error:
            self.close()
            raise EngineError(f"SGLang could not be imported ({error}); its log: {self.log}") from error

    def start(self, launch: Launch, log: Path, path: str, environment: Mapping[str, str], known: Known) -> None:
        """A new host, see process.StartHost; launch: of the same kind as this server's."""
        log = log.absolute()  # the server is in another folder than we are
        order = {"op": "fork", "path": path, "log": str(log), "folder": str(log.parent)}

        def forked(answer: dict[str, Any]) -> None:
            self.hosts.add(answer["pid"])
            known(Forked(answer["pid"], self))

        try:
            self._ask({**order, "environment": dict(environment)}, heard=forked)
        except (OSError, wire.WireClosed) as error:
            raise EngineError(f"the process that engines are forked from is gone; its log: {self.log}") from error
        finally:
            if launch in self.awaited:
                self.awaited.remove(launch)

    def _start(self) -> socket.socket:
        self._orders, theirs = socket.socketpair()
        self._folder = temporary_folders.TemporaryFolder("fork-server-")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self.log.open("ab") as output, interrupts_held():
            self._process = subprocess.Popen(
                [str(self.launch.python), "-P", str(process.HOST), "fork-server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment_of(self.launch), "TMPDIR": self._folder.name},
                cwd=self.log.parent,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return self._orders

    def _ask(
        self,
        order: dict[str, Any] | None,
        progress: Progress = lambda _text: None,
        heard: Callable[[dict[str, Any]], None] = lambda _answer: None,
    ) -> dict[str, Any]:
        """Its answer to an order, None: to the one it has. Without one it is ended: the next would get this one's.

        heard: told of the answer before any interrupt is heard.
        """
        start = time.monotonic()
        try:
            with self._turn:
                orders = self._orders  # another thread may end it meanwhile
                if orders is None:
                    raise wire.WireClosed("it was ended")
                if order is not None:
                    wire.send(orders, order)
                while not select.select([orders], [], [], 0.5)[0]:
                    if time.monotonic() > start + process.BOOT_SECONDS:
                        raise wire.WireClosed("it does not answer")
                    progress(f"booting, imports first ({time.monotonic() - start:.0f} s)")
                with interrupts_held():  # it is there by now
                    answer = wire.receive(orders)[0]
                    heard(answer)
                return answer
        except BaseException:
            self.close()
            raise

    def collect(self, pid: int) -> None:
        """A host that has ended may go; nothing happens where its server is gone too."""
        with contextlib.suppress(OSError, wire.WireClosed):
            self._ask({"op": "collect", "pid": pid})
        self.hosts.discard(pid)

    def close(self) -> None:
        """End it. Forked hosts that are known live on; called twice is once. An interrupt is heard behind it."""
        with interrupts_held():  # or it stays for ever, stopped
            self._end()

    def _end(self) -> None:
        running, self._process = self._process, None
        orders, self._orders = self._orders, None
        folder, self._folder = self._folder, None
        unknown = set[int]()
        if running is not None:
            # It forks nothing more; once it has ended, what it forked is nobody's child.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGSTOP)
            unknown = _children(running.pid) - self.hosts
        if orders is not None:
            with contextlib.suppress(OSError):
                orders.shutdown(socket.SHUT_RDWR)  # whoever waits for an answer reads its end
            orders.close()
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            for host in unknown:
                end_group(host)
        if folder is not None:
            folder.cleanup()


def _children(pid: int) -> set[int]:
    """None where it is gone."""
    with contextlib.suppress(psutil.Error):
        return {one.pid for one in psutil.Process(pid).children()}
    return set()


@dataclass(slots=True)
class ForkServers:
    """The fork servers of the latest kinds, and others for as long as they are `needed`. Any thread may ask.

    logs: folder of their logs. keeps: how many kinds are the latest.
    """

    logs: Path
    keeps: int = 1
    started: int = 0
    servers: dict[str, ForkServer] = field(default_factory=dict)
    closed: bool = False
    _turn: threading.RLock = field(default_factory=threading.RLock)

    def begin(self, launch: Launch) -> None:
        """The process that this launch's host will be forked from starts to import; `server` waits for it."""
        with self._turn:
            self._asked(self._of(launch), ForkServer.begin)

    def server(self, launch: Launch, progress: Progress = lambda _text: None) -> ForkServer:
        """The one that this launch's host is forked from, ready for it or `refused`.

        EngineError once all were ended.
        """
        with self._turn:
            server = self._of(launch)
            server.awaited.append(launch)  # nobody ends it while it is asked
        self._asked(server, lambda one: one.ready(progress))
        if server.refused:
            server.awaited.remove(launch)
        return server

    def _of(self, launch: Launch) -> ForkServer:
        kind = kind_of(launch)
        if self.closed:
            raise EngineError("the processes that engines are forked from were ended")
        others = [one for one in self.servers if one != kind]  # the latest come last
        for other in others[: max(len(others) - self.keeps + 1, 0)]:
            if not self.servers[other].needed:
                self.servers.pop(other).close()
        if kind in self.servers and self.servers[kind].died:
            self.servers.pop(kind).close()
        if kind not in self.servers:
            self.started += 1
            self.servers[kind] = ForkServer(launch, self.logs / f"fork-server-{self.started}.log")
        self.servers[kind] = self.servers.pop(kind)
        return self.servers[kind]

    def _asked(self, server: ForkServer, question: Callable[[ForkServer], None]) -> None:
        try:
            if not server.refused:
                question(server)
        except EngineError as error:
            server.refused = str(error)  # what is wrong with its imports, an engine's own boot says better
        if self.closed:  # while it was asked, be it before it was started
            server.close()

    def close(self) -> None:
        """End all of them, and start none any more."""
        self.closed = True
        with contextlib.ExitStack() as left, self._turn:
            while self.servers:
                left.callback(self.servers.popitem()[1].close)
