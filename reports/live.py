"""Progress of a run: a live line on a terminal, else one printed line a scenario.

Without a terminal nothing is drawn over, so a line is repeated only every PULSE_SECONDS: enough to see that it lives.
It observes the run and cannot affect it. It must not judge, and must not import torch or sglang.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from harness.checks.findings import kinds
from harness.contract.trace import replaced_kernels
from harness.contract.types import Outcome
from harness.driving.progress import Booted, Judged, Preparing, Progress, Started, Stepped
from harness.driving.results import ScenarioResult, mean_accept_length
from reports.prose import say, say_list

#: How long an output without a terminal may be silent.
PULSE_SECONDS = 15.0
STYLE = {Outcome.PASS: "bold green", Outcome.FAIL: "bold red", Outcome.UNKNOWN: "bold yellow"}


class StatusLine:
    """A line that is drawn over while something goes on, on a terminal alone: use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = Status("starting", console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


class LiveLine(StatusLine):
    """Use as a context manager around a run, and as its observer."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._last = clock()
        self._now = ""
        self._places: dict[str, str] = {}
        self._said = ""
        self._engine: list[str] = []

    def __call__(self, event: Progress) -> None:
        match event:
            case Preparing(text=text, log=log):
                self._show(text, once=text.split("(")[0], more=f"; its own output: {log}" if log is not None else "")
            case Booted(header=header, seconds=seconds):
                self._booted(header, seconds)
            case Started(scenario=scenario, index=index, total=total):
                place = f"{index:>{len(str(total))}}/{total}"
                self._now = self._places[scenario.id] = f"scenario {place} {scenario.name}"
                self._show(self._now, once="")
            case Stepped(scheduler_step=scheduler_step, state=state):
                running, waiting = len(state.get("running", ())), len(state.get("waiting", ()))
                self._show(
                    f"{self._now}: scheduler step {scheduler_step}, {running} running, {waiting} waiting", once=""
                )
            case Judged(result=result):
                self._say(scenario_line(self._places.get(result.scenario.id, self._now), result))

    def _booted(self, header: dict[str, Any], seconds: float) -> None:
        """The engine in full the first time, in one line when the same one comes up again."""
        self._said = ""
        name = f"SGLang {header.get('release')} on {header.get('device')}"
        self._say(f"{name}, booted in {seconds:.0f} s")
        for line in lease_facts(header.get("lease")):
            say(self._console, f"  {line}")
        facts = engine_facts(header)
        if facts != self._engine:
            self._engine = facts
            say(self._console, f"  {facts[0]}")
            if facts[1:]:
                say_list(self._console, "replacement kernels:", facts[1:])

    def _show(self, text: str, *, once: str, more: str = "") -> None:
        """The live line. Without a terminal: when `once` changes, without its clock, and whole at every pulse."""
        if self._status is not None:
            self._status.update(escape(text))
        elif once and once != self._said:
            self._said = once
            self._say(re.sub(r" \([^)]*\)", "", text, count=1))
        elif self._clock() - self._last >= PULSE_SECONDS:
            self._say(text + more)

    def _say(self, text: str | Text) -> None:
        self._last = self._clock()
        say(self._console, text)


def lease_facts(lease: dict[str, Any] | None) -> list[str]:
    """The share of a GPU that an engine runs on, and whether it keeps to it."""
    if not lease:
        return []
    share, used = lease["share_mib"] / 1024, lease.get("used_mib")
    lines = [f"leases {share:g} GiB of {lease['card']} ({lease['uuid']})"]
    if used is not None:
        lines[0] += f", uses {used / 1024:.1f} GiB"
        if used > lease["share_mib"]:
            lines.append(f"more than its share; name a larger one:  --gpu-share {used // 1024 + 1}")
    return lines


def engine_facts(header: dict[str, Any]) -> list[str]:
    """Which engine answered, then every operation in it that is not its own."""
    ours = dict.fromkeys(map(short_name, replaced_kernels(header)))
    schedule = "overlap" if header.get("overlap") else "normal"
    facts = f"{header.get('worker')}, {schedule} loop, {header.get('backend')} attention, {header.get('dtype')}"
    reverted = f", #{header['revert']} reverted" if header.get("revert") else ""
    return [f"{facts}, torch {header.get('torch')}{reverted}{_changed(header)}{_asked(header)}", *ours]


def short_name(replaced: Mapping[str, Any]) -> str:
    """What an operation of SGLang that a kernel of ours computed is called."""
    return str(replaced["operation"]).rpartition(".")[2]


def _asked(header: dict[str, Any]) -> str:
    """The arguments that went to SGLang as they were."""
    return "".join(f", {name}={value}" for name, value in (header.get("server_args") or {}).items())


def _changed(header: dict[str, Any]) -> str:
    """What an engine that calls itself a release is not of it."""
    first, *more = header.get("changed_files") or [""]
    return f", not as published: {first}{f' and {len(more)} more' if more else ''}" if first else ""


def drafted(results: Sequence[ScenarioResult]) -> tuple[str, int]:
    """How much was drafted: steps, or, where layers do it while they catch up, how many of them a round."""
    if results and all(one.scenario.spec.algorithm == "MTP" for one in results):
        return "draft layers", max(one.scenario.spec.layers for one in results)
    return "draft steps", sum(one.draft_steps for one in results)


def scenario_line(now: str, result: ScenarioResult) -> Text:
    """`now`, the verdict, the kinds found or the first words of why there is none, and accept lengths."""
    line = Text(f"{now:<40} ")
    line.append(str(result.verdict.outcome), style=STYLE[result.verdict.outcome])
    if wrong := kinds(result.findings, roots_only=True):
        line.append(f"  {', '.join(wrong)}")
    elif result.verdict.outcome is Outcome.UNKNOWN and result.verdict.reasons:
        line.append(f"  {result.verdict.reasons[0].splitlines()[0].split(';')[0]}")
    mean = mean_accept_length([result])
    if result.accept is not None:
        line.append(f"  accept length: {result.accept.text}", style="dim")
    elif mean is not None:
        line.append(f"  accept length {mean:.2f}", style="dim")
    return line
