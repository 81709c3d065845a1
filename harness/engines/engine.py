"""One engine process from the control side: boot, lockstep turns, deadlines, and the certainty that it ends with us.

It must never import sglang, and must never decide whether what the engine did was right.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from harness.both_sides import wire
from harness.both_sides.wire import named
from harness.engines import endings, ranks, scratch
from harness.engines.endings import Endings
from harness.engines.group import end_group
from harness.engines.interrupts import interrupts_held

_HOST = Path(__file__).parents[1] / "engine_side" / "host" / "engine_host.py"

#: Deadlines in seconds. A turn is one pass of the scheduler's loop; interpreted kernels make it slow on a CPU.
BOOT_SECONDS = 300.0
TURN_SECONDS = 120.0
#: What looking at the cards may take beyond the time that a lease is waited for.
LEASE_SECONDS = 60.0
#: When everything has drained, every output is on its way already.
ARRIVAL_SECONDS = 30.0
COLLECT_SECONDS = 15.0
CLOSE_SECONDS = 5.0


#: How the reason begins when our side of the engine failed.
DEFECT = "harness defect, which says nothing about SGLang"


Frame = tuple[dict[str, Any], dict[str, np.ndarray]]
#: what the probe of one rank told, in order
Messages = list[Frame]
#: What is done while an engine takes a turn, given what tells whether it has.
Meanwhile = Callable[[Callable[[], bool]], None]


class EngineError(Exception):
    """The engine cannot be used (would not start, wrong release): UNKNOWN, not a finding."""


class NoLease(EngineError):
    """No share of a GPU could be had within the time allowed, or a card is taken by something else."""


class EngineNotClean(EngineError):
    """The previous scenario left something behind, so that the next one would not start from a clean slate."""


class EngineCrashed(Exception):
    """A scheduler rank died; `report` has site, error, phase, round and rank, `messages` what it had not told yet."""

    def __init__(self, report: dict[str, Any], messages: Messages | None = None) -> None:
        super().__init__(f"{report.get('error', 'engine died')} at {report.get('site', 'unknown site')}")
        self.report = report
        self.messages = messages or []


class EngineLost(Exception):
    """Somebody ended or stopped the engine: UNKNOWN. `report`: what is known of that, and where a rank was."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["what"])
        self.report = report


class EngineHung(Exception):
    """A turn passed its deadline; `report` names the rank and what it did last."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(f"no answer from rank {report['dp_rank']} within {report['seconds']:.0f} s")
        self.report = report


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything needed to boot one engine: interpreter, import path, and the boot record sent to the host."""

    python: Path
    pythonpath: tuple[Path, ...]
    boot: dict[str, Any]
    ranks: int = 1
    #: the decode side's engine, where prefill and decode are two (see harness.engines.paired_engine)
    beside: Launch | None = None


@dataclass(slots=True)
class _Peer:
    sock: socket.socket
    hello: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one rank reported after one loop turn; on a GPU its messages may be of the turns before."""

    dp_rank: int
    tp_rank: int
    number: int
    state: dict[str, Any]
    told: dict[str, np.ndarray]
    #: "prefill" or "decode" where these are two engines
    side: str = ""

    def messages(self) -> Messages:
        """What the probe told; takes a while to read, which nobody should wait for."""
        return _messages(self.told)


@dataclass(slots=True)
class Engine:
    """A booted engine. Use `boot`, then `begin` / `submit` / `turn` / `collect` / `end`, and always `close`."""

    launch: Launch
    log: Path
    process: subprocess.Popen[bytes] | None = None
    ranks: list[_Peer] = field(default_factory=list)
    boots_seconds: float = 0.0
    #: the share of a GPU this engine holds; empty without one (see harness.both_sides.leases)
    lease: dict[str, Any] = field(default_factory=dict)
    _host: _Peer | None = None
    _lookouts: list[_Peer] = field(default_factory=list)
    _routes: dict[str, int] = field(default_factory=dict)
    _lifeline: list[socket.socket] = field(default_factory=list)
    _turns: int = 0
    _scenarios: int = 0
    _seen: dict[str, Any] = field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _endings: Endings | None = None

    @property
    def handshakes(self) -> list[dict[str, Any]]:
        """The probe handshake of every rank, by (dp_rank, tp_rank), and the share of a GPU they run on."""
        lease = {"lease": self.lease} if self.lease else {}
        return [{**peer.hello, **lease} for peer in self.ranks]

    def boot(self, *, progress: Callable[[str], None] = lambda _text: None) -> None:
        """Start the host and wait for every rank's handshake; EngineError with the log's last lines otherwise.

        NoLease when the launch asks for a share of a GPU and there is none. Waiting for one is no part of the boot.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = self._listen(listener)
            self._spawn(path)
            if self.launch.boot.get("lease") is not None:
                self._await_boot(listener, self.launch.boot["lease"]["wait"] + LEASE_SECONDS, progress, until="leased")
            start = time.monotonic()
            self._await_boot(listener, BOOT_SECONDS, progress, until="booted")
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()
        self.boots_seconds = time.monotonic() - start
        self._watch_endings()

    def _watch_endings(self) -> None:
        """From now on it is known how each of the engine's processes ends, and which first."""
        assert self.process is not None
        known = {peer.hello["pid"]: "scheduler" for peer in self.ranks}
        with contextlib.suppress(psutil.Error):
            inner = psutil.Process(self.process.pid).children(recursive=True)
            known = {one.pid: "SGLang's own" for one in inner} | known
        self._endings = Endings(processes={self.process.pid: endings.MAIN, **known}, log=self.log)
        self._endings.start()

    def _listen(self, listener: socket.socket) -> str:
        try:
            scratch.remove_once()
            self._folder = scratch.make()
            path = str(Path(self._folder.name, "control.sock"))
            listener.bind(path)  # socket paths have room for about 100 characters
        except OSError as error:
            where = f"cannot make a socket for the engine in {tempfile.gettempdir()}: {error.strerror or error}"
            raise EngineError(f"{where}; name another folder with a short path:  export TMPDIR=/tmp") from error
        listener.listen()
        return path

    def _environment(self, path: str) -> dict[str, str]:
        """What the host is started with; path: of the socket that it connects to."""
        found = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(Path(path).parent),  # SGLang leaves its socket files behind; this folder goes with the engine
        }
        if self.launch.pythonpath:
            found["PYTHONPATH"] = os.pathsep.join(str(part) for part in self.launch.pythonpath)
        return found

    def _spawn(self, path: str) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            try:
                with interrupts_held():  # between the fork and the assignment, nobody could end the process
                    self.process = subprocess.Popen(
                        [str(self.launch.python), "-P", str(_HOST), path],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=self._environment(path),
                        cwd=self.log.parent,
                        start_new_session=True,
                    )
            except OSError as error:
                raise EngineError(f"cannot start {self.launch.python}: {error.strerror}") from error

    def _await_boot(
        self, listener: socket.socket, seconds: float, progress: Callable[[str], None], *, until: str
    ) -> None:
        """Greet whoever connects until the host has said `until`; booted means every rank too."""
        start, said = time.monotonic(), ""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            if self._host is not None:
                selector.register(self._host.sock, selectors.EVENT_READ)
            while said != until or (until == "booted" and not self._all_here()):
                self._check_alive()
                if time.monotonic() > start + seconds:
                    what = {"leased": "take a GPU lease", "booted": "boot"}[until]
                    raise EngineError(f"the engine did not {what} within {seconds:.0f} s; {self._log_tail()}")
                for key, _ in selector.select(timeout=0.5):
                    if key.fileobj is listener:
                        peer = self._greet(listener)
                        if peer is not None and peer.hello["role"] == "host":
                            wire.send(peer.sock, self.launch.boot)
                            selector.register(peer.sock, selectors.EVENT_READ)
                    else:
                        said = self._host_says(progress)
                if until == "booted":
                    progress(f"booting ({time.monotonic() - start:.0f} s)")
        self.ranks.sort(key=lambda peer: (peer.hello["dp_rank"], peer.hello["tp_rank"]))

    def _all_here(self) -> bool:
        """Every rank, and where there are several every lookout."""
        lookouts = self.launch.ranks if self.launch.ranks > 1 else 0
        return len(self.ranks) == self.launch.ranks and len(self._lookouts) >= lookouts

    def _greet(self, listener: socket.socket) -> _Peer | None:
        sock, _ = listener.accept()
        try:
            hello, _arrays = wire.receive(sock)
        except wire.WireClosed:  # it died between its call and its first word; why is in the log
            sock.close()
            return None
        peer = _Peer(sock, hello)
        if hello["role"] == "scheduler":
            self.ranks.append(peer)
        elif hello["role"] == "lookout":
            self._lookouts.append(peer)
        elif hello["role"] == "host":
            self._host = peer
        else:
            self._lifeline.append(sock)
        return peer

    def _host_says(self, progress: Callable[[str], None]) -> str:
        """The host's next message: its `op`, or the EngineError that it stands for."""
        assert self._host is not None
        try:
            message, _ = wire.receive(self._host.sock)
        except wire.WireClosed:
            raise EngineError(f"the engine ended while booting; {self._log_tail()}") from None
        match message["op"]:
            case "boot_failed":
                raise EngineError(f"the engine would not start: {message['error']}; {self._log_tail()}")
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
        assert self.process is not None
        code = self.process.poll()
        if code is not None:
            raise EngineError(f"the engine ended with code {code} while booting; {self._log_tail()}")

    def _log_tail(self, lines: int = 6) -> str:
        try:
            text = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            text = []
        return f"full log: {self.log}; it ends with:\n  " + "\n  ".join(text[-lines:])

    def begin(
        self, *, chunk: int | None, running_limit: int | None = None, record: bool = True
    ) -> list[dict[str, Any]]:
        """Flush caches, set the scenario's knobs and arm (or disarm) the recorders; one answer a rank.

        Raises EngineNotClean if SGLang will not flush: something of the last scenario is still alive.
        """
        self._scenarios += 1
        if self._endings is not None:
            self._endings.mark()
        command = {"op": "begin", "chunk": chunk, "running_limit": running_limit, "record": record}
        answers = [self._ask(peer, command) for peer in self.ranks]
        if not all(answer["flushed"] for answer in answers):
            raise EngineNotClean("SGLang would not flush its caches: something of the previous scenario is still alive")
        return answers

    def flush(self) -> list[dict[str, Any]]:
        """Empty the prefix cache between two turns; one answer a rank, `flushed` false while requests are alive."""
        return [self._ask(peer, {"op": "flush"}) for peer in self.ranks]

    def fault(self, name: str, *, first: int = 1) -> None:
        """Arm a mutant on every rank until the next `begin`, from the first-th batch of the scenario on."""
        for peer in self.ranks:
            self._ask(peer, {"op": "fault", "name": name, "first": first})

    def transfer(self, what: str, rooms: list[int]) -> None:
        """Tell every rank what is to become of these hand-overs (see harness.engine_side.transfer_backend.files)."""
        for peer in self.ranks:
            self._ask(peer, {"op": "transfer", "what": what, "rooms": rooms})

    def end(self) -> list[dict[str, Any]]:
        """Disarm the recorders, read the pool levels and what was not told yet; one answer a rank."""
        answers = []
        for peer in self.ranks:
            answer, arrays = self._asked(peer, {"op": "end"})
            answers.append({**answer, "messages": _messages(arrays)})
        return answers

    def submit(
        self,
        *,
        rid: str,
        prompt: list[int],
        sampling: dict[str, Any],
        priority: int | None = None,
        dp_rank: int = 0,
        room: int | None = None,
        side: str = "",
        fake: bool = False,
    ) -> bool:
        """Hand a request to the engine; it is delivered at the turn that expects it. False if SGLang refused it.

        room: where two engines meet over it. side: which of two is meant; one engine is all there is. fake: SGLang's
        own backend that moves nothing.
        """
        self._routes[rid] = dp_rank
        command = {
            "op": "submit",
            "rid": self._tagged(rid),
            "prompt": prompt,
            "sampling": sampling,
            "priority": priority,
            "dp_rank": dp_rank if len(self.ranks) > 1 else None,
            "room": room,
            "fake": fake,
        }
        return not self._ask_host(command)["refused"]

    def abort(self, rid: str, *, side: str = "") -> None:
        self._ask_host({"op": "abort", "rid": self._tagged(rid)})

    def _tagged(self, rid: str) -> str:
        """Unique for the life of the engine; the engine side strips it again (see recorder.plain_rid)."""
        return f"{rid}@{self._scenarios}"

    def pause(self, *, mode: str) -> None:
        """SGLang's own pause: 'in_place' or 'retract'; read at the next turn."""
        self._ask_host({"op": "pause", "mode": mode})

    def resume(self) -> None:
        self._ask_host({"op": "resume"})

    def collect(self, rids: Iterable[str]) -> list[dict[str, Any]]:
        """The outputs of finished requests, in the order asked for."""
        asked = list(rids)
        command = {"op": "collect", "rids": [self._tagged(rid) for rid in asked]}
        ends = self._ask_host(command, seconds=COLLECT_SECONDS)["ends"]
        return [{**end, "rid": rid} for rid, end in zip(asked, ends, strict=True)]

    def turn(self, *, expect: list[str], meanwhile: Meanwhile = lambda _answered: None) -> list[Turn]:
        """One turn of every rank's loop, delivering exactly the announced requests; raises EngineCrashed/EngineHung.

        meanwhile: called once while the engine takes the turn, with what tells whether it has.
        """
        self._turns += 1
        own = [self._expected(peer, expect) for peer in self.ranks]
        together = len(self.ranks) > 1
        if together:
            self._await_arrivals(own)
        for peer, names in zip(self.ranks, own, strict=True):
            self._send(peer, {"op": "turn", "turn": self._turns, "expect": names, "polled": together})
        meanwhile(_answered(self.ranks))
        frames = self._receive_all()
        return [self._read_turn(peer, *frame) for peer, frame in zip(self.ranks, frames, strict=True)]

    def _expected(self, peer: _Peer, expect: list[str]) -> list[str]:
        """What of `expect` a rank gets: its own requests, and every message that has no rank."""
        rank = peer.hello["dp_rank"]
        return [name for name in expect if self._routes.get(name, rank) == rank]

    def _await_arrivals(self, own: list[list[str]]) -> None:
        """Every rank asks SGLang's sockets equally often, since that is a collective, until all have theirs."""
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while True:
            for peer, names in zip(self.ranks, own, strict=True):
                self._send(peer, {"op": "poll", "expect": names})
            missing = [name for answer, _ in self._receive_all() for name in answer["missing"]]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise EngineError(f"announced, but SGLang never passed on: {', '.join(missing)}")
            time.sleep(0.001)

    def _receive_all(self) -> list[Frame]:
        """One message of each rank; EngineCrashed for the first rank that fell, EngineHung for the one behind."""
        if len(self.ranks) == 1:
            return [self._receive(self.ranks[0])]
        found = ranks.gather([peer.sock for peer in self.ranks], seconds=TURN_SECONDS)
        names = [{"dp_rank": peer.hello["dp_rank"], "tp_rank": peer.hello["tp_rank"]} for peer in self.ranks]
        for frame in found:  # before anything else: what one rank could not do makes the others fall or wait
            if isinstance(frame, tuple):
                self._refused(frame[0])
        fallen = ranks.first_to_fall(found)
        if fallen is not None:
            frame, taken = found[fallen], self._endings and self._endings.taken()
            if not isinstance(frame, tuple) or taken:  # what one rank lost makes the others fall too
                raise self._silent_end(self.ranks[fallen])
            raise self._crashed({**frame[0], **names[fallen]}, frame[1])
        if any(frame is None for frame in found):
            where = [{**name, **ranks.ask(self._lookout(name))} for name in names]
            silent = [here for here, frame in zip(where, found, strict=True) if frame is None]
            behind = min(silent, key=ranks.progress)
            self._not_stopped()
            raise EngineHung({**behind, "seconds": TURN_SECONDS, "silent": len(silent), "ranks": where})
        return [frame for frame in found if isinstance(frame, tuple)]

    def _refused(self, message: dict[str, Any]) -> None:
        """EngineError for what is no fault of SGLang's: a command that cannot be done, or a defect of ours."""
        if message["op"] == "error":
            ours = f"{DEFECT}: " if "trace" in message else ""  # something of ours raised it
            raise EngineError(f"{ours}{message['what']}")

    def _lookout(self, name: dict[str, int]) -> socket.socket | None:
        return next((p.sock for p in self._lookouts if name.items() <= p.hello.items()), None)

    def _read_turn(self, peer: _Peer, report: dict[str, Any], arrays: dict[str, np.ndarray]) -> Turn:
        self._refused(report)
        self._seen = report.pop("last", None) or self._seen  # where a rank was, should it never speak again
        return Turn(
            dp_rank=peer.hello["dp_rank"],
            tp_rank=peer.hello["tp_rank"],
            number=report["turn"],
            state={key: report[key] for key in ("running", "waiting", "chunked", "idle")}
            | ({"moving": report["moving"]} if self.launch.boot.get("handoff") else {}),
            told=arrays,
            side=self.launch.boot.get("handoff", {}).get("side", ""),
        )

    def _send(self, peer: _Peer, command: dict[str, Any]) -> None:
        """Write a command; a peer that is gone may have said why before it went."""
        try:
            wire.send(peer.sock, command)
        except wire.WireClosed:
            self._refused(self._receive(peer)[0])
            raise self._silent_end(peer) from None

    def _ask(self, peer: _Peer, command: dict[str, Any], *, seconds: float | None = None) -> dict[str, Any]:
        return self._asked(peer, command, seconds=seconds)[0]

    def _asked(self, peer: _Peer, command: dict[str, Any], *, seconds: float | None = None) -> Frame:
        self._send(peer, command)
        answer, arrays = self._receive(peer, seconds=seconds)
        if answer["op"] == "error":
            raise EngineError(f"the engine refused {command['op']!r}: {answer['what']}")
        return answer, arrays

    def _ask_host(self, command: dict[str, Any], *, seconds: float | None = None) -> dict[str, Any]:
        assert self._host is not None
        return self._ask(self._host, command, seconds=seconds)

    def _receive(self, peer: _Peer, *, seconds: float | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        rank = {"dp_rank": peer.hello.get("dp_rank", 0), "tp_rank": peer.hello.get("tp_rank", 0)}
        seconds = seconds or TURN_SECONDS
        peer.sock.settimeout(seconds)
        try:
            message, arrays = wire.receive(peer.sock)
        except TimeoutError:
            self._not_stopped()
            raise EngineHung({**rank, "seconds": seconds}) from None
        except wire.WireClosed:
            raise self._silent_end(peer) from None
        if message["op"] == "crashed":
            raise self._crashed({**rank, **message}, arrays)
        return message, arrays

    def _crashed(self, report: dict[str, Any], arrays: dict[str, np.ndarray]) -> Exception:
        """What a rank said of its own end."""
        if str(report.get("error", "")).startswith(endings.FROM_OUTSIDE):
            what = f"{endings.OUTSIDE}: a scheduler was interrupted ({endings.FROM_OUTSIDE}), as by Ctrl-C"
            return EngineLost({**report, "what": f"{what}; run it again\n  {self._log_tail()}"})
        return EngineCrashed(report, _messages(arrays))

    def _not_stopped(self) -> None:
        """EngineLost where the engine says nothing because somebody stopped it."""
        for pid, who in self._endings.processes.items() if self._endings is not None else ():
            if endings.stopped(pid):
                what = f"{endings.OUTSIDE}: {who} process {pid} is stopped, as by SIGSTOP or a debugger"
                raise EngineLost(
                    {"what": f"{what}, which says nothing about SGLang; let it run, and run again", **self._where()}
                )

    def _where(self) -> dict[str, Any]:
        return {f"at_{key}": value for key, value in self._seen.items()}

    def _silent_end(self, peer: _Peer) -> EngineCrashed | EngineLost:
        """What can be said of a process that could not say anything any more."""
        hello, pid = peer.hello, int(peer.hello.get("pid", 0))
        watch = self._endings or Endings(processes={pid: str(hello.get("role", "engine"))}, log=self.log)
        rank = {"dp_rank": hello.get("dp_rank", 0), "tp_rank": hello.get("tp_rank", 0), **self._where()}
        ending = watch.first(pid)
        if watch.from_outside(ending):
            return EngineLost({**rank, "what": f"{watch.told(ending)}; {self._log_tail()}"})
        error = f"{ending.who} process {ending.pid} {ending.how} without a word; see {self.log}"
        return EngineCrashed({**rank, "error": error, "site": ending.signal or f"exit-{ending.code}"})

    def close(self) -> None:
        """End the engine's whole process group, by the id we started; safe to call twice."""
        process, self.process = self.process, None  # two threads may close at once, while two sides boot
        watch, self._endings = self._endings, None
        if watch is not None:
            watch.stop()
        if process is not None:
            end_group(process.pid)
            process.wait(timeout=CLOSE_SECONDS)
        for sock in [peer.sock for peer in self.ranks] + self._lifeline + ([self._host.sock] if self._host else []):
            sock.close()
        for peer in self._lookouts:
            peer.sock.close()
        self.ranks, self._lifeline, self._lookouts, self._host = [], [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _messages(arrays: dict[str, np.ndarray]) -> Messages:
    """The probe's messages out of a frame's arrays, each with its own; an empty list where it brought none."""
    text = arrays.pop("messages", None)
    messages: Messages = [] if text is None else [(named(message), {}) for message in marshal.loads(text.data)]
    for name, array in arrays.items():
        index, _, label = name.partition(".")
        messages[int(index)][1][label] = array
    return messages


def _answered(peers: list[_Peer]) -> Callable[[], bool]:
    """Whether some of them have something to say."""
    poller = select.poll()
    for peer in peers:
        poller.register(peer.sock, select.POLLIN)
    return lambda: bool(poller.poll(0))
