"""The engine that is driven: booted on demand or ahead, reused while the scenario fits it, else ended.

It must not judge, and must not know what a run or a test is.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from threading import Event, Lock
from typing import Any

import psutil

from harness.both_sides.gpus import BY_NVML
from harness.both_sides.leases import Request
from harness.contract.scenario import Scenario
from harness.contract.trace import ENDS, Trace
from harness.driving.drive import OnStep, drive
from harness.engines.engine import Engine
from harness.engines.errors import EngineError, EngineNotClean, NoLease
from harness.engines.fork_server import ForkServers, can_fork
from harness.engines.lent_servers import BorrowedServers
from harness.engines.process import Launch, Progress

#: What a trace says of engines that were started so.
COPIES = "copied processes"
#: One configuration is not booted more often than this without success: the next scenario hears the same at once.
MOST_FAILED_BOOTS = 2
#: Seconds below which it is not worth waiting for a lease: how often a card is looked at.
LEAST_WAIT = 1.0
#: MiB of the host's memory that must be free before an engine is booted ahead: twice what one takes.
FREE_AHEAD = 6 << 10


def unobserved(_scheduler_step: int, _state: dict[str, Any]) -> None:
    """No observer."""


@dataclass(slots=True, kw_only=True, repr=False)
class EnginePool:
    """Boots, reuses and ends engines, of which one is driven at a time. logs: where the output of each goes, by
    `log_name`.

    copies: fork SGLang's processes from one that has imported it (see harness.engine_side.host.fork_server). lender:
    where another process lends its own for that (see harness.engines.lent_servers), empty where none does. ahead: how
    many engines may boot beside the one that is driven (`expect`). lease: the share of a GPU that every engine takes
    first; each wait in vain halves the next one, until an engine has got it again.
    preparing, booted: whom to notify that an engine is being started (in words, with its log), and that it answered.
    """

    logs: Path
    log_name: str = "engine-{boot}.log"
    lease: Request | None = None
    copies: bool = False
    lender: str = ""
    ahead: int = 0
    preparing: Callable[[str, Path], None] = lambda _text, _log: None
    booted: Callable[[Engine], None] = lambda _engine: None
    boots: int = 0
    #: how long to wait for a lease while nobody has waited in vain
    _patience: float = 0.0
    #: seconds in which nothing could be driven since an engine was not there yet
    waited: float = 0.0
    _engine: Engine | None = None
    _key: str = ""
    _fork_servers: ForkServers | BorrowedServers | None = None
    #: boot configuration -> the engines that boot or have booted for later
    _expected: dict[str, list[Future[Engine]]] = field(default_factory=dict)
    _threads: ThreadPoolExecutor | None = None
    #: whether what boots ahead may begin: not before the engine that is waited for has its share of a card
    _go: Event = field(default_factory=lambda: _set(Event()))
    #: engines that end beside what is driven
    _ending: list[Future[None]] = field(default_factory=list)
    _ends: ThreadPoolExecutor | None = None
    #: every engine that was not ended yet, also while it boots
    _made: set[Engine] = field(default_factory=set)
    #: boot configuration -> why it did not boot, each time since it last did
    _failed: dict[str, list[EngineError]] = field(default_factory=dict)
    _turn: Lock = field(default_factory=Lock)
    _ended: bool = False

    def prepare(self, launch: Launch) -> None:
        """The imports of this engine begin, where it is forked from a process that makes them for all."""
        copied = self._copied(launch)
        if can_fork(copied):
            self._servers().begin(copied)

    def use(self, launch: Launch) -> Engine:
        """The live engine if it is this one, else this one booted in its place. Raises EngineError."""
        key = _key_of(launch)
        if not self._drives(key):
            if self._expected.get(key):
                self._let_go()
            else:  # it may need the place that this one has
                self.close()
            start = time.monotonic()
            try:
                self._engine, self._key = self._up(launch, key), key
            finally:
                self.waited += time.monotonic() - start
                self._go.set()
            self.booted(self._engine)
        assert self._engine is not None
        return self._engine

    def _drives(self, key: str) -> bool:
        return self._key == key and self.alive()

    def _up(self, launch: Launch, key: str) -> Engine:
        """Booted ahead or now, unless that failed too often."""
        failed = self._failed.setdefault(key, [])
        if len(failed) >= MOST_FAILED_BOOTS:
            raise failed[-1]
        try:
            engine = self._taken(key) or self._boot(launch)
        except EngineError as error:
            if not isinstance(error, NoLease):
                failed.append(error)
            raise
        failed.clear()
        return engine

    def expect(self, launches: Sequence[Launch], *, now: Launch | None = None) -> None:
        """Boot the first of these beside what is driven, as many as may be ahead and as there is memory for.

        now: what is used next, and may be one more of the same; where nobody has booted it yet, it takes a card first.
        One that does not come up says so when it is used; where a card had no room for one, no more than these are any
        more.
        """
        self._drop_those_without_room()
        wanted = Counter(_key_of(one) for one in (now,) if one is not None and not self._drives(_key_of(one)))
        if any(not self._expected.get(key) for key in wanted):
            self._go.clear()
        for launch in launches[: self.ahead]:
            key, free = _key_of(launch), psutil.virtual_memory().available >> 20
            wanted[key] += 1
            there = len(self._expected.get(key, ())) >= wanted[key]
            if not there and sum(map(len, self._expected.values())) < self.ahead and free > FREE_AHEAD:
                self._threads = self._threads or ThreadPoolExecutor(max_workers=self.ahead)
                boot = self._threads.submit(self._boot, _unwaiting(launch), quiet=True)
                self._expected.setdefault(key, []).append(boot)

    def _drop_those_without_room(self) -> None:
        """They boot in their turn; from now on only as many boot ahead as found room."""
        failed = {
            key: [boot for boot in boots if boot.done() and isinstance(boot.exception(), NoLease)]
            for key, boots in self._expected.items()
        }
        if any(failed.values()):
            for key, boots in failed.items():
                self._expected[key] = [one for one in self._expected[key] if one not in boots]
            self.ahead = sum(map(len, self._expected.values()))

    def _taken(self, key: str) -> Engine | None:
        """The engine that was booted ahead for this, if one was. Where it got no share of a card, none is any more."""
        if not self._expected.get(key):
            return None
        expected = self._expected[key].pop(0)  # `_made` has the engine, whatever interrupts this
        self._go.set()
        self.preparing("booting ahead", self.logs)
        try:
            engine = expected.result()
        except NoLease:
            self.ahead = 0
            self._forget()
            return None
        if engine.process is None or engine.process.poll() is not None:
            self._close(engine)
            return None
        return engine

    def _boot(self, launch: Launch, *, quiet: bool = False) -> Engine:
        """This engine, booted. quiet: nobody is notified, and no wait for a lease tells of the next."""
        with self._turn:
            self.boots += 1
            log = self.logs / self.log_name.format(boot=self.boots)
            if self.boots > 1 and log.name == self.log_name:
                log = log.with_stem(f"{log.stem}-{self.boots}")
        progress: Progress = (lambda _text: None) if quiet else lambda text: self.preparing(text, log)

        def boots(text: str) -> None:
            self._go.set()
            progress(text)

        engine = self._started(launch, log, progress)
        self._made.add(engine)
        try:
            if quiet:
                self._go.wait()
                if self._ended:
                    raise EngineError("nothing is booted ahead any more")
            engine.boot(progress=progress if quiet else boots)
        except BaseException as error:
            self._close(engine)
            if isinstance(error, NoLease) and self.lease is not None and not quiet:
                self._patience = max(self._patience, self.lease.wait)
                half = self.lease.wait / 2
                self.lease = replace(self.lease, wait=half if half >= LEAST_WAIT else 0.0)
            raise
        if self.lease is not None and not quiet:
            self.lease = replace(self.lease, wait=max(self._patience, self.lease.wait))
        return engine

    def _started(self, launch: Launch, log: Path, progress: Progress) -> Engine:
        """An engine to be booted, forked where that is wanted and can be."""
        copied = self._copied(launch)
        if not can_fork(copied):
            return Engine(launch=copied, log=log)
        server = self._servers().server(copied, progress)
        if server.refused:
            flags = [*launch.boot.get("flags", ()), f"not {COPIES}: {server.refused}"]
            return Engine(launch=replace(launch, boot={**launch.boot, "flags": flags}), log=log)
        return Engine(launch=copied, log=log, start=server.start)

    def _servers(self) -> ForkServers | BorrowedServers:
        with self._turn:
            own = self._fork_servers or (BorrowedServers(self.lender) if self.lender else ForkServers(self.logs))
            self._fork_servers = own
            return own

    def _copied(self, launch: Launch) -> Launch:
        """The launch with the way of starting that is wanted, for both sides of a pair."""
        device = launch.boot.get("device")
        on_cuda = device == "cuda"
        if not self.copies or device is None:
            return launch
        beside = None if launch.beside is None else self._copied(launch.beside)
        boot = {**launch.boot, "forked": True, "flags": [*launch.boot.get("flags", ()), COPIES]}
        if on_cuda:
            boot["environment"] = {**boot["environment"], **BY_NVML}
        return replace(launch, boot=boot, beside=beside)

    def alive(self) -> bool:
        return self._engine is not None and self._engine.process is not None and self._engine.process.poll() is None

    def drive(self, launch: Launch, scenario: Scenario, *, record: bool = True, on_step: OnStep = unobserved) -> Trace:
        """The engine's trace of one scenario; one that died, hung, refused or got new weights is not used again."""
        try:
            try:
                trace = drive(self.use(launch), scenario, record=record, on_step=on_step)
            except EngineNotClean:  # nothing of this scenario has run yet: a new engine, not a second try
                self.close()
                trace = drive(self.use(launch), scenario, record=record, on_step=on_step)
        except BaseException:  # a time-out or Ctrl-C in the middle of a step leaves the engine in no known state
            self.close()
            raise
        if any(trace.named(*ENDS)) or scenario.updates:
            self.close()
        return trace

    def close(self) -> None:
        """End the live engine, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._close(engine)

    def _close(self, engine: Engine) -> None:
        engine.close()
        self._made.discard(engine)

    def _let_go(self) -> None:
        """The live engine ends while another is used."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._ends = self._ends or ThreadPoolExecutor(max_workers=1)
            self._ending.append(self._ends.submit(self._close, engine))

    def _forget(self) -> None:
        """End every engine, and those that still boot."""
        expected = [*chain.from_iterable(self._expected.values())]
        self._expected.clear()
        with ExitStack() as left:  # in reverse, each whatever becomes of the others
            left.callback(self._close_all)  # some may have come up meanwhile
            left.callback(wait, [one for one in expected if not one.cancel()])
            left.callback(self._close_all)  # whoever boots one fails now

    def _close_all(self) -> None:
        with ExitStack() as left:
            for engine in self._made.copy():
                left.callback(self._close, engine)

    def end(self) -> None:
        """End everything that was started; then EngineError if something would not end."""
        self._ended = True
        self._go.set()
        with ExitStack() as left:  # in reverse, each whatever becomes of the others
            left.callback(self._heard)
            for threads in (self._ends, self._threads):
                if threads is not None:
                    left.callback(threads.shutdown)
            left.callback(self._forget)
            if self._fork_servers is not None:
                left.callback(self._fork_servers.close)
            self.close()

    def _heard(self) -> None:
        """Of engines that ended beside what was driven."""
        while self._ending:
            self._ending.pop().result()


def _set(event: Event) -> Event:
    event.set()
    return event


def beginning(scenarios: Sequence[Scenario]) -> Iterator[Scenario]:
    """Those of scenarios in boot order, behind the first one, that need another engine than the one before them."""
    for before, scenario in pairwise(scenarios):
        if before.updates or before.boot_key() != scenario.boot_key():
            yield scenario


def _key_of(launch: Launch) -> str:
    """Launches of one engine have the same; what it may wait for a card is no part of it."""
    boot = {name: value for name, value in launch.boot.items() if name != "lease"}
    return json.dumps([str(launch.python), *map(str, launch.pythonpath), boot], sort_keys=True)


def _unwaiting(launch: Launch) -> Launch:
    """The same engine, which does without a card where there is none at once: its place may be taken by another."""
    lease = launch.boot.get("lease")
    return launch if lease is None else replace(launch, boot={**launch.boot, "lease": {**lease, "wait": 0.0}})


@dataclass(slots=True, kw_only=True, repr=False)
class BorrowedPool(EnginePool):
    """What a command gets as its pool where another one is alive: boots into that one, and leaves it running."""

    owner: EnginePool

    def prepare(self, launch: Launch) -> None:
        """Nothing: whoever lends it imports for what it boots."""

    def expect(self, launches: Sequence[Launch], *, now: Launch | None = None) -> None:
        """Nothing: what booted here would never be used, nor ended."""

    def use(self, launch: Launch) -> Engine:
        engine = self.owner.use(launch)
        if engine is not self._engine:
            self._engine, self.boots = engine, self.boots + 1
            self.booted(engine)
        return engine

    def drive(self, launch: Launch, scenario: Scenario, *, record: bool = True, on_step: OnStep = unobserved) -> Trace:
        self.use(launch)
        return self.owner.drive(launch, scenario, record=record, on_step=on_step)

    def close(self) -> None:
        self._engine = None

    def end(self) -> None:
        self.close()
