"""One engine host and its ranks in lockstep: commands, answers, scheduler steps, timeouts.

Control side. It must never import sglang, and must never decide whether what the engine did was right.
"""

from __future__ import annotations

import marshal
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.both_sides import wire
from harness.both_sides.wire import named
from harness.engines import exits, ranks
from harness.engines.errors import DEFECT, EngineCrashed, EngineError, EngineHung, EngineLost, Frame, Messages
from harness.engines.exits import Exits
from harness.engines.process import HostProcess, Peer

#: Deadlines in seconds. A step is one pass of the scheduler's loop; interpreted kernels make it slow on a CPU.
STEP_SECONDS = 120.0
#: How many times as long at most, where more processes want to run than there are processors: kernels that a first
#: step compiles take so much longer there, and a hang is a claim about SGLang.
CROWDED = 4.0
#: When everything has drained, every output is on its way already.
ARRIVAL_SECONDS = 30.0

#: What is done while an engine takes a step, given what says whether it has.
Meanwhile = Callable[[Callable[[], bool]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one rank reported after a scheduler step; on a GPU its messages may be of the steps before."""

    dp_rank: int
    tp_rank: int
    number: int
    state: dict[str, Any]
    arrays: dict[str, np.ndarray]
    #: "prefill" or "decode" where these are two
    side: str = ""

    def messages(self) -> Messages:
        """What the probe reported; takes a while to read, which nobody should wait for."""
        return unpacked(self.arrays)


def unpacked(arrays: dict[str, np.ndarray]) -> Messages:
    """The probe's messages out of a frame's arrays, each with its own; an empty list where it brought none."""
    text = arrays.pop("messages", None)
    messages: Messages = [] if text is None else [(named(message), {}) for message in marshal.loads(text.data)]
    for name, array in arrays.items():
        index, _, label = name.partition(".")
        messages[int(index)][1][label] = array
    return messages


@dataclass(slots=True)
class Side(HostProcess):
    """A booted host that answers commands and whose ranks take scheduler steps."""

    #: request -> the rank that it goes to
    routes: dict[str, int] = field(default_factory=dict)
    _steps: int = 0
    #: where a rank was when it last spoke
    _seen: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """ "prefill" or "decode" where these are two."""
        return str(self.launch.boot.get("handoff", {}).get("side", ""))

    @property
    def _step_seconds(self) -> float:
        crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
        return STEP_SECONDS * self.launch.patience * min(max(crowd, 1.0), CROWDED)

    # -- commands ------------------------------------------------------------------------------------------------

    def ask_host(self, command: dict[str, Any], *, seconds: float | None = None) -> dict[str, Any]:
        """The host's answer; EngineError if it refuses."""
        return self._ask(self.host, command, seconds=seconds)[0]

    def ask_ranks(self, command: dict[str, Any]) -> list[Frame]:
        """Every rank's answer, one rank after the other; EngineError if one refuses."""
        return [self._ask(peer, command) for peer in self.ranks]

    def _ask(self, peer: Peer, command: dict[str, Any], *, seconds: float | None = None) -> Frame:
        self._send(peer, command)
        answer, arrays = self._receive(peer, seconds=seconds)
        if answer["op"] == "error":
            raise EngineError(f"the engine refused {command['op']!r}: {answer['what']}")
        return answer, arrays

    def _send(self, peer: Peer, command: dict[str, Any]) -> None:
        """Write a command; a peer that is gone may have said why before it went."""
        try:
            wire.send(peer.sock, command)
        except wire.WireClosed:
            _refuse(self._receive(peer)[0])
            raise self._silent_end(peer) from None

    def _receive(self, peer: Peer, *, seconds: float | None = None) -> Frame:
        seconds = seconds or self._step_seconds
        peer.sock.settimeout(seconds)
        try:
            message, arrays = wire.receive(peer.sock)
        except TimeoutError:
            self._check_stopped()
            raise EngineHung({**peer.rank, "seconds": seconds}) from None
        except wire.WireClosed:
            raise self._silent_end(peer) from None
        if message["op"] == "crashed":
            raise self._crashed({**peer.rank, **message}, arrays)
        return message, arrays

    # -- scheduler steps -----------------------------------------------------------------------------------------

    def step(self, expect: list[str], meanwhile: Meanwhile) -> list[StepReport]:
        """One pass of every rank's loop, delivering exactly the announced requests; raises EngineCrashed/EngineHung."""
        self._steps += 1
        own = [(peer, self._expected(peer, expect)) for peer in self.ranks]
        together = len(own) > 1
        if together:
            self._await_arrivals(own)
        for peer, names in own:
            self._send(peer, {"op": "step", "number": self._steps, "expect": names, "polled": together})
        meanwhile(_answered(self.ranks))
        frames = self._receive_all()
        return [self._read_step(peer, *frame) for peer, frame in zip(self.ranks, frames, strict=True)]

    def _expected(self, peer: Peer, expect: list[str]) -> list[str]:
        """What of `expect` a rank gets: its own requests, and every message that has no rank."""
        rank = peer.hello["dp_rank"]
        return [name for name in expect if self.routes.get(name, rank) == rank]

    def _await_arrivals(self, own: list[tuple[Peer, list[str]]]) -> None:
        """Every rank asks SGLang's sockets equally often, since that is a collective, until all have theirs."""
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while True:
            for peer, names in own:
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
        found = ranks.gather([peer.sock for peer in self.ranks], seconds=self._step_seconds)
        for frame in found:  # before anything else: what one rank could not do makes the others fall or wait
            if isinstance(frame, tuple):
                _refuse(frame[0])
        fallen = ranks.first_to_fall(found)
        if fallen is not None:
            peer, frame = self.ranks[fallen], found[fallen]
            if not isinstance(frame, tuple) or (self.exits and self.exits.taken()):
                raise self._silent_end(peer)  # what one rank lost makes the others fall too
            raise self._crashed({**frame[0], **peer.rank}, frame[1])
        if any(frame is None for frame in found):
            raise self._hung([frame is None for frame in found])
        return [frame for frame in found if isinstance(frame, tuple)]

    def _read_step(self, peer: Peer, report: dict[str, Any], arrays: dict[str, np.ndarray]) -> StepReport:
        _refuse(report)
        self._seen = report.pop("last", None) or self._seen
        known = ["running", "waiting", "chunked", "idle", *(("moving",) if self.name else ())]
        known += [name for name in ("taken_back", "sent") if report.get(name)]
        state = {key: report[key] for key in known}
        return StepReport(**peer.rank, number=report["number"], state=state, arrays=arrays, side=self.name)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _hung(self, silent: list[bool]) -> EngineHung:
        """Which of the silent ranks is behind, from their watchdogs."""
        watchdogs = [
            next((dog.sock for dog in self.peers["watchdog"] if dog.rank == peer.rank), None) for peer in self.ranks
        ]
        where = [{**peer.rank, **ranks.ask(dog)} for peer, dog in zip(self.ranks, watchdogs, strict=True)]
        behind = min((one for one, quiet in zip(where, silent, strict=True) if quiet), key=ranks.progress)
        self._check_stopped()
        return EngineHung({**behind, "seconds": self._step_seconds, "silent": sum(silent), "ranks": where})

    def _crashed(self, report: dict[str, Any], arrays: dict[str, np.ndarray]) -> Exception:
        """What a rank said of its own end."""
        if str(report.get("error", "")).startswith(exits.FROM_OUTSIDE):
            what = f"{exits.OUTSIDE}: a scheduler was interrupted ({exits.FROM_OUTSIDE}), as by Ctrl-C"
            return EngineLost({**report, "what": f"{what}; run it again\n  {self.log_tail()}"})
        return EngineCrashed(report, unpacked(arrays))

    def _check_stopped(self) -> None:
        """EngineLost where the engine says nothing because somebody stopped it."""
        for pid, who in self.exits.processes.items() if self.exits is not None else ():
            if exits.stopped(pid):
                what = f"{exits.OUTSIDE}: {who} process {pid} is stopped, as by SIGSTOP or a debugger"
                advice = "which says nothing about SGLang; let it run, and run again"
                raise EngineLost({"what": f"{what}, {advice}", **self._where()})

    def _silent_end(self, peer: Peer) -> EngineCrashed | EngineLost:
        """What can be said of a process that could not say anything any more."""
        pid = int(peer.hello.get("pid", 0))
        watch = self.exits or Exits(processes={pid: str(peer.hello.get("role", "engine"))}, log=self.log)
        ending, report = watch.first(pid), {**peer.rank, **self._where()}
        if watch.from_outside(ending):
            return EngineLost({**report, "what": f"{watch.describe(ending)}; {self.log_tail()}"})
        error = f"{ending.who} process {ending.pid} {ending.how} without a word; see {self.log}"
        return EngineCrashed({**report, "error": error, "site": ending.signal or f"exit-{ending.code}"})

    def _where(self) -> dict[str, Any]:
        return {f"at_{key}": value for key, value in self._seen.items()}


def _refuse(message: dict[str, Any]) -> None:
    """EngineError for what is no fault of SGLang's: a command that cannot be done, or a defect of ours."""
    if message["op"] == "error":
        ours = f"{DEFECT}: " if "trace" in message else ""  # something of ours raised it
        raise EngineError(f"{ours}{message['what']}")


def _answered(peers: list[Peer]) -> Callable[[], bool]:
    """Whether some of them have something to say."""
    poller = select.poll()
    for peer in peers:
        poller.register(peer.sock, select.POLLIN)
    return lambda: bool(poller.poll(0))
