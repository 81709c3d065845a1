"""The cells of a night side by side, in processes of this machine that each have engines of their own.

Results come as they are done. It must not judge them, and keeps nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness.archive.faults import WriteError
from harness.both_sides.leases import Request
from harness.contract.types import Outcome
from harness.driving.adapt import NOTHING, Wanted
from harness.driving.live import LiveEngines
from harness.engines.envs import EngineEnv
from harness.engines.fork_server import ForkServers
from harness.engines.lent_servers import Lender
from harness.engines.processes import interrupts_held
from harness.night.cells import Cell
from harness.night.records import CellResult
from harness.night.run import Driver
from harness.night.waiting import Group, Waiting, groups

#: A cell that ended so many processes is not driven again.
MOST_LOST = 2
#: Seconds that all processes together have to end their engines.
ENDING_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What each process of a night has. environments: by release; folder: the night's own; the rest as of `Driver` and
    `EnginePool`."""

    environments: dict[str, EngineEnv]
    folder: Path
    device: str = "cpu"
    revert: int | None = None
    repeats: int = 2
    wanted: Wanted = NOTHING
    lease: Request | None = None
    ahead: int = 0
    lender: str = ""

    def driver(self, *, logs: Path, done: Callable[[CellResult], None]) -> Driver:
        return Driver(
            make=lambda: self._engines(logs),
            folder=self.folder,
            device=self.device,
            revert=self.revert,
            repeats=self.repeats,
            wanted=self.wanted,
            done=done,
        )

    def _engines(self, logs: Path) -> LiveEngines:
        return LiveEngines(
            environment=self.environments.__getitem__,
            default=next(iter(self.environments)),
            device=self.device,
            logs=logs,
            lease=self.lease,
            copies=True,
            ahead=self.ahead,
            lender=self.lender,
        )


def drive(setup: Setup, cells: Sequence[Cell], *, jobs: int, done: Callable[[CellResult], None]) -> None:
    """All of these cells, in this process or in so many of their own, for which this one imports SGLang."""
    logs = setup.folder / "logs"
    if jobs == 1:
        setup.driver(logs=logs, done=done).run(cells)
        return
    with Lender(ForkServers(logs, keeps=jobs)) as lender:
        lent, waiting = replace(setup, lender=lender.path), Waiting.of(cells, device=setup.device)
        _Jobs(setup=lent, cells=cells, most=jobs, done=done, waiting=waiting).run()


@dataclass(slots=True, kw_only=True)
class _Job:
    """One process. has: the groups it was given, without the cells that are done."""

    process: BaseProcess
    pipe: Connection
    logs: Path
    has: list[Group] = field(default_factory=list)

    def left(self) -> list[Cell]:
        """In the order in which it drives them: the first is the one that it is at."""
        return [cell for group in self.has for cell in group.cells]

    def did(self, key: str) -> None:
        self.has = groups(cell for cell in self.left() if cell.key != key)


@dataclass(slots=True, kw_only=True)
class _Jobs:
    """The processes of a night, at most so many, and what each of them is at.

    A process hears of cells at the start and after each that is done, of none where it has enough, so that it knows in
    time what it may boot ahead.
    """

    setup: Setup
    cells: Sequence[Cell]
    most: int
    done: Callable[[CellResult], None]
    waiting: Waiting
    _busy: list[_Job] = field(default_factory=list)
    #: those for which nothing was left
    _ending: list[_Job] = field(default_factory=list)
    #: how many processes a cell has ended
    _lost: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        try:
            self._begin()
            while self._busy:
                heard = wait([job.pipe for job in self._busy])
                for job in [one for one in self._busy if one.pipe in heard]:
                    self._hear(job)
                    self._begin()
        finally:
            with interrupts_held():
                self._end()

    def _begin(self) -> None:
        """As many processes as may be and have something to do."""
        while len(self._busy) < self.most and (group := self._next("")) is not None:
            with interrupts_held():
                job = self._started()
            self._tell(job, [group])

    def _started(self) -> _Job:
        logs = self.setup.folder / "logs" / f"job-{len(self._busy) + len(self._ending) + 1}"
        pipe, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_work, args=(self.setup, self.cells, theirs, logs), daemon=True)
        process.start()
        theirs.close()
        self._busy.append(_Job(process=process, pipe=pipe, logs=logs))
        return self._busy[-1]

    def _next(self, last: str, *, ahead: bool = False) -> Group | None:
        busy = [group for job in self._busy for group in job.has]
        return self.waiting.take(last=last, busy=busy, ahead=ahead)

    def _tell(self, job: _Job, new: Sequence[Group]) -> None:
        """What comes, and what it may boot beside the one that it is at, while there is enough for all."""
        told = [*new]
        job.has += new
        while len(job.has) <= self.setup.ahead and len(self.waiting.groups) >= self.most and not job.has[0].ranks:
            later = self._next(job.has[-1].release, ahead=True)
            if later is None:
                break
            job.has.append(later)
            told.append(later)
        with suppress(OSError):  # it is gone, which is heard of next
            job.pipe.send([cell.key for group in told for cell in group.cells])

    def _hear(self, job: _Job) -> None:
        try:
            came: CellResult | WriteError = job.pipe.recv()
        except (EOFError, OSError):
            self._died(job)
            return
        if isinstance(came, WriteError):
            raise came
        job.did(came.key)
        self.done(came)
        group = None if job.has else self._next(came.engine)
        if job.has or group is not None:
            self._tell(job, [] if group is None else [group])
        else:
            self._dismiss(job)

    def _dismiss(self, job: _Job) -> None:
        """It ends, and its engines with it, since it hears of nothing more."""
        self._busy.remove(job)
        self._ending.append(job)
        job.pipe.close()

    def _died(self, job: _Job) -> None:
        """Others drive what it had; not a cell that did this before."""
        self._dismiss(job)
        job.process.join()
        first, *others = job.left()
        self._lost[first.key] += 1
        if self._lost[first.key] == MOST_LOST:
            self.done(_unknown(first, job))
        else:
            others = [first, *others]
        self.waiting.groups += groups(others)

    def _end(self) -> None:
        """All are told at once, and have the same time; those that hear of nothing more may be at an engine still."""
        processes = [job.process for job in (*self._busy, *self._ending)]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + ENDING_SECONDS
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _unknown(cell: Cell, job: _Job) -> CellResult:
    """Of a cell that ended its process, again."""
    count = len(cell.scenarios) or 1
    code = job.process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"code {code}"
    return CellResult(
        **cell.facts(),
        verdict=Outcome.UNKNOWN,
        reasons=(f"the process that drove it ended with {how}, the second one that did; its logs: {job.logs}",),
        scenarios=count,
        failed=0,
        unknown=count,
        left_out=0,
        findings=(),
        accepted={},
        ties=0,
        choices=0,
        seconds=0.0,
    )


def _work(setup: Setup, cells: Sequence[Cell], pipe: Connection, logs: Path) -> None:
    """In a process of its own: whatever of the cells it is told to, until nothing more can come."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "job.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever began it is interrupted, and ends it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    by_key = {cell.key: cell for cell in cells}
    driver = setup.driver(logs=logs, done=pipe.send)
    driver.more = lambda: [by_key[key] for key in _told(pipe)]
    try:
        driver.run(())
    except WriteError as error:
        pipe.send(error)
    except (KeyboardInterrupt, BrokenPipeError):
        return


def _told(pipe: Connection) -> list[str]:
    """Keys of the cells that come; none where there are no more, or enough were told before."""
    try:
        keys: list[str] = pipe.recv()
    except EOFError:
        return []
    return keys


def _end_with_parent() -> None:
    """A night that was killed leaves nobody behind who drives on."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
