"""How engine processes ended: which was first, and whether SGLang or something outside ended it.

Control side; it must never import sglang, and must not end a process itself.

A process that ends by a fault of its own (a segmentation fault, an abort, an exit code) is SGLang's crash. SIGKILL,
SIGTERM and their kind come from somebody: a person, a job limit, the kernel when memory is short. That says nothing
about SGLang. SGLang too kills all its processes after one of them failed, but never without a word in the log before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: How the reason begins when somebody ended or stopped the engine.
OUTSIDE = "ended from outside"
#: Signals that a process gets for what it did itself.
FAULTS = (
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
)
#: What SGLang's processes write before they end each other, since one of them failed.
OWN_KILL = (b"SIGQUIT received", b"hit an exception")
#: How an error begins that reached a process from outside: Ctrl-C.
FROM_OUTSIDE = "KeyboardInterrupt"
#: How long a process may take from closing its socket to its end.
LAST_SECONDS = 2.0
#: What the process is called that all others are children of, and how long its end may take longer than theirs.
MAIN, ALONE_SECONDS = "main", 0.5
#: Processes killed for memory on this machine since it started.
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One process's end. code: as os.waitstatus_to_exitcode gives it, None where nobody can say any more.

    logged: bytes that the engine's log had by then.
    """

    pid: int
    who: str
    code: int | None
    logged: int

    @property
    def signal(self) -> str:
        """The signal's name; empty for an exit code, or where it is not known."""
        if self.code is None or self.code >= 0:
            return ""
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.code).name
        return f"signal {-self.code}"

    @property
    def how(self) -> str:
        """The end of "it …"."""
        if self.code is None:
            return "ended without a word, and how is not known"
        return f"was ended by {self.signal}" if self.signal else f"ended with code {self.code}"

    @property
    def own_fault(self) -> bool:
        return self.code is not None and (self.code >= 0 or -self.code in FAULTS)


@dataclass(slots=True, kw_only=True)
class Exits:
    """Watches processes from `start` to `stop` and keeps their ends in order. processes: pid -> what it is."""

    processes: Mapping[int, str]
    log: Path
    ended: list[Ending] = field(default_factory=list)
    began: int = 0
    killed_before: int = 0
    _thread: threading.Thread | None = None
    _stop: tuple[int, int] = (-1, -1)

    def start(self) -> None:
        """Begin to watch; without pidfds (an old kernel, a strict sandbox) nothing will be known, which is no error."""
        self.killed_before = memory_kills()
        held: dict[int, int] = {}
        try:
            for pid in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    held[os.pidfd_open(pid)] = pid
        except OSError:
            for one in held:
                os.close(one)
            return
        self._stop = os.pipe()
        self._thread = threading.Thread(target=self._watch, args=(held,), name="exits", daemon=True)
        self._thread.start()

    def _watch(self, held: dict[int, int]) -> None:
        poll = select.poll()
        for one in (*held, self._stop[0]):
            poll.register(one, select.POLLIN)
        try:
            while held:
                ready = [one for one, _ in poll.poll()]
                if self._stop[0] in ready:
                    return
                logged, found = _size(self.log), []
                for one in ready:
                    poll.unregister(one)
                    pid = held.pop(one)
                    os.close(one)
                    # At once: whoever waits for it may collect it, and then nobody can ask any more.
                    found.append(Ending(pid=pid, who=self.processes[pid], code=exit_code(pid), logged=logged))
                self.ended += sorted(found, key=lambda ending: not ending.own_fault)  # of those at once, the cause
        finally:
            for one in held:
                os.close(one)

    def mark(self) -> None:
        """A scenario begins: what the log says from here on is of it."""
        self.began = _size(self.log)

    def stop(self) -> None:
        """Called twice is once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            os.write(self._stop[1], b".")
            thread.join()
            for one in self._stop:
                os.close(one)

    def first(self, pid: int) -> Ending:
        """The end that came first and was no orderly one; pid: a process known to be gone, or on its way.

        The main process's, if that killed the others: they ask the kernel to die with it, and are quicker.
        """
        self._await(pid, LAST_SECONDS)
        found = self._find(lambda one: one.code != 0 or one.pid == pid)
        if found is None:
            who = self.processes.get(pid, "engine")
            return Ending(pid=pid, who=who, code=exit_code(pid), logged=_size(self.log))
        main = next((one for one, who in self.processes.items() if who == MAIN), found.pid)
        if main != found.pid and found.signal == "SIGKILL":
            self._await(main, ALONE_SECONDS)
            return self._find(lambda one: one.pid == main and one.code != 0) or found
        return found

    def _await(self, pid: int, seconds: float) -> None:
        """Until its end is known, if it is watched."""
        deadline = time.monotonic() + seconds
        while self._thread is not None and not self._find(lambda one: one.pid == pid) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _find(self, wanted: Callable[[Ending], bool]) -> Ending | None:
        return next(filter(wanted, self.ended), None)

    def from_outside(self, ending: Ending) -> bool:
        """Whether it was neither the process's own fault, nor SGLang's doing, which says so in the log before."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.began)
                log = file.read(max(ending.logged - self.began, 0))
        except OSError:
            log = b""
        return not ending.own_fault and not any(word in log for word in OWN_KILL)

    def taken(self) -> Ending | None:
        """The first end that came from outside, of those that are known by now."""
        return self._find(lambda one: one.code != 0 and self.from_outside(one))

    def describe(self, ending: Ending) -> str:
        """What is known of an end from outside: what happened, what the kernel counts, what to type next."""
        killed = max(memory_kills() - self.killed_before, 0)
        counts = (
            f"the kernel counts {killed} ended for lack of memory on this machine meanwhile: give it more memory, or "
            "fewer engines at a time"
            if killed
            else "the kernel counts none ended for lack of memory (oom_kill in /proc/vmstat): look for a job limit, "
            "another program or a person"
        )
        return (
            f"{OUTSIDE}: {ending.who} process {ending.pid} {ending.how}, which says nothing about SGLang\n"
            f"  {counts}\n  then run it again"
        )


def exit_code(pid: int) -> int | None:
    """How a process that nobody has collected yet ended; None if it still runs, or is gone."""
    state, *_, status = _status(pid)
    return os.waitstatus_to_exitcode(int(status)) if state in (b"Z", b"X") else None


def stopped(pid: int) -> bool:
    """Whether somebody has stopped the process (SIGSTOP, a debugger): it cannot answer, whatever it did."""
    return _status(pid)[0] in (b"T", b"t")


def _status(pid: int) -> list[bytes]:
    """The kernel's line on a process, from its state on; its exit status is the last. Two empty words of none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return [b"", b""]


def memory_kills() -> int:
    """Processes that the kernel has killed for memory since the machine started; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in VMSTAT.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
