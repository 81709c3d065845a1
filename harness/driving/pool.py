"""The one live engine: booted on demand, reused while the scenario fits it, else ended.

It must not judge, and must not know what a run or a test is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.both_sides.leases import Request
from harness.contract.scenario import Scenario
from harness.contract.trace import ENDS, Trace
from harness.driving.drive import OnStep, drive
from harness.engines.engine import Engine
from harness.engines.errors import EngineNotClean, NoLease
from harness.engines.fork_server import ForkServers, can_fork
from harness.engines.process import Launch

#: What a trace says of engines that were started so.
COPIES = "copied processes"


def unwatched(_scheduler_step: int, _state: dict[str, Any]) -> None:
    """No observer."""


@dataclass(slots=True, kw_only=True, repr=False)
class EnginePool:
    """Boots, reuses and ends engines, one at a time. logs: where the output of each goes, named by `log_name`.

    copies: fork SGLang's processes from the host (see harness.engine_side.host.fork_server), on a CPU and without
    ranks. lease: the share of a GPU that every engine takes first; no waiting any more once that had no effect.
    preparing, booted: whom to notify that an engine is being started (in words, with its log), and that it answered.
    """

    logs: Path
    log_name: str = "engine-{boot}.log"
    lease: Request | None = None
    copies: bool = False
    preparing: Callable[[str, Path], None] = lambda _text, _log: None
    booted: Callable[[Engine], None] = lambda _engine: None
    boots: int = 0
    _engine: Engine | None = None
    _key: str = ""
    _fork_servers: ForkServers | None = None

    def use(self, launch: Launch) -> Engine:
        """The live engine if it is this one, else this one booted in its place. Raises EngineError."""
        launch = self._quick(launch)
        boot = {name: value for name, value in launch.boot.items() if name != "lease"}
        key = json.dumps([str(launch.python), *map(str, launch.pythonpath), boot], sort_keys=True)
        if self._engine is None or self._key != key or not self.alive():
            self.close()
            self.boots += 1
            log = self.logs / self.log_name.format(boot=self.boots)
            engine = self._forked(launch, log) if can_fork(launch) else Engine(launch=launch, log=log)
            try:
                engine.boot(progress=lambda text: self.preparing(text, log))
            except BaseException as error:
                engine.close()
                if isinstance(error, NoLease) and self.lease is not None:
                    self.lease = replace(self.lease, wait=0.0)
                raise
            self._engine, self._key = engine, key
            self.booted(engine)
        return self._engine

    def _quick(self, launch: Launch) -> Launch:
        """The launch with the way of starting that is wanted, for both sides of a pair."""
        if not self.copies or launch.boot.get("device") != "cpu" or launch.ranks > 1:
            return launch  # ranks get their requests over sockets that the process they would be forked from has open
        beside = None if launch.beside is None else self._quick(launch.beside)
        flags = [*launch.boot["flags"], COPIES]
        return replace(launch, boot={**launch.boot, "forked": True, "flags": flags}, beside=beside)

    def _forked(self, launch: Launch, log: Path) -> Engine:
        """An engine that costs no import of SGLang, where the last one was of its kind."""
        if self._fork_servers is None:
            self._fork_servers = ForkServers(self.logs)
        return self._fork_servers.engine(launch, log)

    def alive(self) -> bool:
        return self._engine is not None and self._engine.process is not None and self._engine.process.poll() is None

    def drive(self, launch: Launch, scenario: Scenario, *, record: bool = True, on_step: OnStep = unwatched) -> Trace:
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
        if any(event.name in ENDS for event in trace.events) or any(op.kind == "update" for op in scenario.script):
            self.close()
        return trace

    def close(self) -> None:
        """End the live engine, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def end(self) -> None:
        """End everything that was started."""
        self.close()
        if self._fork_servers is not None:
            self._fork_servers.close()


@dataclass(slots=True, kw_only=True, repr=False)
class BorrowedPool(EnginePool):
    """What a command gets as its pool where another one is alive: boots into that one, and leaves it running."""

    owner: EnginePool

    def use(self, launch: Launch) -> Engine:
        engine = self.owner.use(launch)
        if engine is not self._engine:
            self._engine, self.boots = engine, self.boots + 1
            self.booted(engine)
        return engine

    def drive(self, launch: Launch, scenario: Scenario, *, record: bool = True, on_step: OnStep = unwatched) -> Trace:
        self.use(launch)
        return self.owner.drive(launch, scenario, record=record, on_step=on_step)

    def close(self) -> None:
        self._engine = None

    def end(self) -> None:
        self.close()
