"""The processes of one engine: boot, handshakes, and that they end when we do.

It must never import sglang, and must not know what is said to the processes once they are up.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from harness.both_sides import wire
from harness.contract.words import some
from harness.engines import exits, server_args, temporary_folders
from harness.engines.errors import EngineError, NoLease
from harness.engines.exits import Exits
from harness.engines.log_excerpt import Excerpt, excerpt
from harness.engines.processes import end_group, interrupts_held

HOST = Path(__file__).parents[1] / "engine_side" / "host" / "engine_host.py"

#: Deadlines in seconds. Interpreted kernels make everything slow on a CPU.
BOOT_SECONDS = 300.0
#: What SGLang's scheduler looks at, when it is made, for the pull request that it reverts.
REVERT = "SGLANG_DEBUG_REVERT_PR"
#: What looking at the cards may take beyond the time that a lease is waited for.
LEASE_SECONDS = 60.0
#: A killed process is gone once its memory and its share of a GPU are given back, which takes a busy machine a while.
CLOSE_SECONDS = 60.0
#: Of a log, said where an engine does not boot or ends.
TAIL_LINES = 6
#: Bytes of a disk below which an empty log is no wonder.
LEAST_FREE = 4096
#: What a target's class in SGLang has to have for an EAGLE or EAGLE-3 draft, and what is said where one has not.
SHARED = ("no attribute 'get_embed_and_head'", "no attribute 'set_eagle3_layers_to_capture'")
SERVES_NO_EAGLE = "so this release serves no such draft of that target; another release, or another target, may"
#: SGLang's environment variables for which models it has; and how many of those that one names are said.
MODELS_BY = (
    *("SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_EXTERNAL_MODEL_PACKAGE"),
    *("SGLANG_EXTERNAL_MM_MODEL_ARCH", "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"),
)
MOST_NAMED = 8

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything needed to boot one engine: interpreter, import path, and the boot record sent to the host."""

    python: Path
    pythonpath: tuple[Path, ...]
    boot: dict[str, Any]
    ranks: int = 1
    #: the decode side, where prefill and decode are two processes
    beside: Launch | None = None
    #: of the usual deadlines, this share: less where a hang is nothing unheard of
    patience: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One connection: a scheduler rank, its watchdog, or the host."""

    sock: socket.socket
    hello: dict[str, Any]

    @property
    def rank(self) -> dict[str, int]:
        return {"dp_rank": self.hello.get("dp_rank", 0), "tp_rank": self.hello.get("tp_rank", 0)}


class Started(Protocol):
    """What is asked of a started host; subprocess.Popen has it."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...


def environment_of(launch: Launch) -> dict[str, str]:
    """What a host is started with, TMPDIR aside."""
    path = {"PYTHONPATH": os.pathsep.join(map(str, launch.pythonpath))} if launch.pythonpath else {}
    return {**os.environ, "PYTHONUNBUFFERED": "1", **path}


#: Hears of a host while interrupts are held: nobody else could end it.
Known = Callable[[Started], None]


def start_host(launch: Launch, log: Path, path: str, environment: Mapping[str, str], known: Known) -> None:
    """A host in a session of its own, which connects to the socket at `path`. Raises EngineError."""
    with log.open("ab") as output, interrupts_held():
        try:
            process = subprocess.Popen(
                [str(launch.python), "-P", str(HOST), path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"cannot start {launch.python}: {error.strerror}") from error
        known(process)


#: A way to start a host: `start_host`, or a fork server's.
StartHost = Callable[[Launch, Path, str, Mapping[str, str], Known], None]


@dataclass(slots=True)
class HostProcess:
    """The host and what it starts: `boot`, then talk to `ranks` and `host`, and always `close`."""

    launch: Launch
    log: Path
    start: StartHost = start_host
    process: Started | None = None
    #: by the role that each says it has: host, scheduler, watchdog, lifeline
    peers: dict[str, list[Peer]] = field(default_factory=lambda: defaultdict(list))
    boot_seconds: float = 0.0
    #: the share of a GPU this engine holds; empty without one (see harness.both_sides.leases)
    lease: dict[str, Any] = field(default_factory=dict)
    #: how each process ends, and which first; known from the boot's end on
    exits: Exits | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _closed: bool = False
    #: of the thread that boots it, and then of one that closes it
    _turn: threading.RLock = field(default_factory=threading.RLock)

    @property
    def ranks(self) -> list[Peer]:
        return self.peers["scheduler"]

    @property
    def host(self) -> Peer:
        return self.peers["host"][0]

    def boot(self, progress: Progress = lambda _text: None) -> None:
        """Start the host and wait for every rank's handshake; EngineError with the log's last lines otherwise.

        NoLease when the launch asks for a share of a GPU and there is none. Waiting for one is no part of the boot.
        EngineError too where another thread closes it meanwhile.
        """
        with self._turn, contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
            try:
                self._check_open()
                path = self._listen(listener)
                self.log.parent.mkdir(parents=True, exist_ok=True)
                # SGLang leaves its socket files behind; this folder goes with the engine.
                environment = {**environment_of(self.launch), "TMPDIR": str(Path(path).parent)}
                self.start(self.launch, self.log, path, environment, self._known)
                if (asked := self.launch.boot.get("lease")) is not None:
                    self._await(listener, asked["wait"] + LEASE_SECONDS, progress, until="leased")
                start = time.monotonic()
                self._await(listener, BOOT_SECONDS * self.launch.patience, progress, until="booted")
                self.boot_seconds = time.monotonic() - start
                self.ranks.sort(key=lambda peer: (peer.hello["dp_rank"], peer.hello["tp_rank"]))
                self._watch_endings()
            except BaseException:
                self.close()
                raise

    def _known(self, process: Started) -> None:
        self.process = process

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was ended while booting")

    def _listen(self, listener: socket.socket) -> str:
        try:
            temporary_folders.remove_once()
            self._folder = temporary_folders.TemporaryFolder()
            path = str(Path(self._folder.name, "control.sock"))
            listener.bind(path)  # socket paths have room for about 100 characters
        except OSError as error:
            where = f"cannot make a socket for the engine in {tempfile.gettempdir()}: {error.strerror or error}"
            raise EngineError(f"{where}; name another folder with a short path:  export TMPDIR=/tmp") from error
        listener.listen()
        return path

    def _await(self, listener: socket.socket, seconds: float, progress: Progress, *, until: str) -> None:
        """Greet whoever connects until the host has said `until`; booted means every rank too."""
        start, said = time.monotonic(), ""
        with selectors.DefaultSelector() as selector:
            for sock in (listener, *(peer.sock for peer in self.peers["host"])):
                selector.register(sock, selectors.EVENT_READ)
            while said != until or (until == "booted" and not self._all_here()):
                self._check_alive()
                if time.monotonic() > start + seconds:
                    what = {"leased": "take a GPU lease", "booted": "boot"}[until]
                    raise self._no_boot(f"the engine did not {what} within {seconds:.0f} s")
                for key, _ in selector.select(timeout=0.5):
                    if key.fileobj is not listener:
                        said = self._host_answer(progress)
                    elif (peer := self._greet(listener)) is not None and peer.hello["role"] == "host":
                        with contextlib.suppress(wire.WireClosed):  # why it ended is said where it is looked for
                            wire.send(peer.sock, self.launch.boot)
                        selector.register(peer.sock, selectors.EVENT_READ)
                if until == "booted":
                    progress(f"booting ({time.monotonic() - start:.0f} s)")

    def _all_here(self) -> bool:
        """Every rank, and where there are several every watchdog."""
        watchdogs = self.launch.ranks if self.launch.ranks > 1 else 0
        return len(self.ranks) == self.launch.ranks and len(self.peers["watchdog"]) >= watchdogs

    def _greet(self, listener: socket.socket) -> Peer | None:
        sock, _ = listener.accept()
        try:
            hello, _arrays = wire.receive(sock)
        except wire.WireClosed:  # it died between its call and its first word; why is in the log
            sock.close()
            return None
        peer = Peer(sock=sock, hello=hello)
        self.peers[hello["role"]].append(peer)
        return peer

    def _host_answer(self, progress: Progress) -> str:
        """The host's next message: its `op`, or the EngineError that it stands for."""
        try:
            message, _ = wire.receive(self.host.sock)
        except wire.WireClosed:
            raise self._no_boot("the engine ended while booting") from None
        match message["op"]:
            case "boot_failed":
                raise self._no_boot(f"the engine would not start: {message['error']}")
            case "no_lease":
                raise NoLease(message["error"])
            case "waiting":
                progress(message["text"])
            case "leased":
                self.lease = message["lease"]
            case "booted" if self.lease:
                self.lease = {**self.lease, "used_mib": message["gpu_used_mib"]}
        return str(message["op"])

    def _check_alive(self) -> None:
        self._check_open()
        assert self.process is not None
        if (code := self.process.poll()) is not None:
            raise self._no_boot(f"the engine ended with code {code} while booting")

    def _watch_endings(self) -> None:
        """From now on it is known how each of the engine's processes ends, and which first."""
        assert self.process is not None
        host = self.process.pid
        known = {peer.hello["pid"]: "scheduler" for peer in self.ranks}
        with contextlib.suppress(psutil.Error):
            known = {one.pid: "SGLang's own" for one in psutil.Process(host).children(recursive=True)} | known
        self.exits = Exits(processes={host: exits.MAIN, **known}, log=self.log)
        self.exits.start()

    def _no_boot(self, what: str) -> EngineError:
        """What happened, by which exception, the log, and what the user set that may be why."""
        said = excerpt(self.log, most=TAIL_LINES)
        because = f": {said.error}" if said.error not in what else ""
        return EngineError("\n  ".join([f"{what}{because}; {self._tail(said)}", *self._hints(said)]))

    def _hints(self, said: Excerpt) -> Iterator[str]:
        chosen = {name: value for name in MODELS_BY if (value := os.environ.get(name))}
        for name, value in chosen.items():
            models = some(value.split(","), MOST_NAMED)
            yield f"{name} is set to {models}, so SGLang has other models than its own; to have those:  unset {name}"
        if not chosen and any(name in line for name in SHARED for line in said.lines):
            yield SERVES_NO_EAGLE
        if given := server_args.typed(self.launch.boot.get("server_args", {})):
            yield f"it was started with {given}; leave out what it does not take"

    def log_tail(self) -> str:
        """Where the log is, how it ends, and the last exception in it."""
        return self._tail(excerpt(self.log, most=TAIL_LINES))

    def _tail(self, said: Excerpt) -> str:
        """A colon at the end of its first line asks `words.brief` for the last one: not where an exception is named."""
        where = f"full log: {self.log}"
        if said.lines:
            announced = (where, "it ends with:") if said.error else (f"{where}; it ends with:",)
            return "\n  ".join((*announced, *said.lines))
        if self.log.exists() and self.log.stat().st_size:
            return where
        full = shutil.disk_usage(self.log.parent).free < LEAST_FREE
        return f"{where}, which is empty" + (": the disk is full\n  make room, or name another place" if full else "")

    def close(self) -> None:
        """End the engine's whole process group, by the id we started; EngineError if it does not end.

        Safe to call twice, and in any thread: whoever boots it fails, and has ended what it started when this returns.
        """
        self._closed = True
        # An interrupt is heard behind it: what it would leave alive is waited for.
        with interrupts_held(), contextlib.ExitStack() as left:  # in reverse, each whatever becomes of the others
            left.callback(self._release)
            watch, self.exits = self.exits, None
            if watch is not None:
                watch.stop()
            if (process := self.process) is not None:
                end_group(process.pid)

    def _release(self) -> None:
        """What was killed is waited for, and what it was talked to over goes."""
        with self._turn, contextlib.ExitStack() as left:
            folder, self._folder = self._folder, None
            if folder is not None:
                left.callback(folder.cleanup)
            for peer in [peer for peers in self.peers.values() for peer in peers]:
                left.callback(peer.sock.close)
            self.peers.clear()
            process, self.process = self.process, None
            if process is None:
                return
            try:
                process.wait(timeout=CLOSE_SECONDS)
            except subprocess.TimeoutExpired as error:
                why = f"process {process.pid} of the engine was killed and is not gone after {CLOSE_SECONDS:.0f} s"
                raise EngineError(f"{why}; its log: {self.log}") from error
