"""Engines whose host is a copy of a process that has SGLang imported already; one such process is kept at a time.

For test sessions on a CPU. It must never import sglang, and must not decide which engine is needed when.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness.both_sides import wire
from harness.engines import engine, scratch
from harness.engines.endings import exit_code
from harness.engines.engine import Engine, EngineError, Launch
from harness.engines.interrupts import interrupts_held

#: Of a boot record: what is not looked at before everything is imported.
LATER = ("arguments", "optional_arguments", "probe", "flags", "mutants_in_graphs")


def kind_of(launch: Launch) -> str:
    """Launches of one kind import the same, in the same environment and with the same seams."""
    boot = {name: value for name, value in launch.boot.items() if name not in LATER}
    return json.dumps([str(launch.python), *map(str, launch.pythonpath), boot], sort_keys=True)


def can_copy(launch: Launch) -> bool:
    """Not ranks, whose processes are no copies either; not what differs from engine to engine before the imports."""
    boot = launch.boot
    told = boot.get("lease") is not None or boot.get("handoff") is not None
    return bool(boot.get("copies")) and launch.ranks == 1 and not told


@dataclass(slots=True)
class Copied:
    """What an engine asks of its process, for one that somebody else started; see subprocess.Popen."""

    pid: int
    template: Template
    returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status; it can still be read by others afterwards, until `wait`."""
        if self.returncode is None:
            self.returncode = exit_code(self.pid, seconds=0.0)
            if self.returncode is None and not Path(f"/proc/{self.pid}").exists():
                self.returncode = -signal.SIGKILL  # its template is gone, and nobody knows
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit status, once it has ended; subprocess.TimeoutExpired if it does not."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"copy {self.pid}", timeout)
            time.sleep(0.005)
        self.template.collect(self.pid)
        return code


@dataclass(slots=True)
class Template:
    """The process that is copied: `ready`, then `copy` as often as wanted. EngineError where it cannot be had."""

    launch: Launch
    log: Path
    _process: subprocess.Popen[bytes] | None = None
    _orders: socket.socket | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def ready(self, environment: Mapping[str, str]) -> None:
        """Start it, unless it was before, and wait until it has imported everything."""
        if self._process is not None:
            return
        try:
            self._start(environment)
            self._ask({"op": "prepare", "boot": self.launch.boot})
        except (OSError, wire.WireClosed) as error:
            raise EngineError(f"SGLang could not be imported ({error}); its log: {self.log}") from error

    def copy(self, path: str, *, log: Path, environment: Mapping[str, str]) -> Copied:
        """A new copy, which leads a session of its own and connects to the socket at `path`."""
        order = {"op": "copy", "path": path, "log": str(log), "folder": str(log.parent)}
        try:
            return Copied(int(self._ask({**order, "environment": dict(environment)})["pid"]), self)
        except (OSError, wire.WireClosed) as error:
            raise EngineError(f"the process that engines are copied from is gone; its log: {self.log}") from error

    def _start(self, environment: Mapping[str, str]) -> None:
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(engine.BOOT_SECONDS)
        self._folder = scratch.make("template-")
        with theirs, self.log.open("ab") as output, interrupts_held():
            self._process = subprocess.Popen(
                [str(self.launch.python), "-P", str(engine._HOST), "template", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, "TMPDIR": self._folder.name},
                cwd=self.log.parent,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Its answer to an order. Without one it is ended: the next order would otherwise get this one's."""
        assert self._orders is not None
        try:
            wire.send(self._orders, order)
            return wire.receive(self._orders)[0]
        except BaseException:
            self.close()
            raise

    def collect(self, pid: int) -> None:
        """A copy that has ended may go; nothing happens where its template is gone too."""
        if self._orders is not None:
            with contextlib.suppress(OSError, wire.WireClosed):
                self._ask({"op": "collect", "pid": pid})

    def close(self) -> None:
        """End it. Copies live on; called twice is once."""
        process, self._process = self._process, None
        orders, self._orders = self._orders, None
        if orders is not None:
            orders.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@dataclass(slots=True)
class CopiedEngine(Engine):
    """An engine whose host is copied from a template."""

    template: Template | None = None

    def _spawn(self, path: str) -> None:
        assert self.template is not None
        environment = self._environment(path)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.template.ready(environment)
        with interrupts_held():  # between the copy and the assignment, nobody could end the process
            copied = self.template.copy(path, log=self.log, environment=environment)
            self.process = cast("subprocess.Popen[bytes]", copied)


@dataclass(slots=True)
class Templates:
    """The template of the latest kind. logs: folder of their logs."""

    logs: Path
    started: int = 0
    _kind: str = ""
    _template: Template | None = None

    def engine(self, launch: Launch, log: Path) -> CopiedEngine:
        """An engine of this launch, not booted yet; an engine of another kind must not live any more."""
        kind = kind_of(launch)
        if self._template is None or kind != self._kind:
            self.close()
            self.started += 1
            self._kind = kind
            self._template = Template(launch, self.logs / f"template-{self.started}.log")
        return CopiedEngine(launch=launch, log=log, template=self._template)

    def close(self) -> None:
        """End the template, if there is one."""
        if self._template is not None:
            self._template.close()
            self._template = None
