"""Runs scenarios: each driven on an engine that fits it, judged beside the next one, and stored.

It must not judge by itself and must not print; a run that cannot be judged is UNKNOWN, never silent.
"""

from __future__ import annotations

import contextlib
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.archive.run_folders import VERDICT
from harness.archive.writer import RunWriter
from harness.contract.providers import WITNESS
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Outcome, Verdict
from harness.contract.words import counted
from harness.driving.judging import JudgeQueue, judge_scenario, judge_with, load_oracle, unjudged
from harness.driving.own_source import git_state, own_version
from harness.driving.plan import Plan, Setup
from harness.driving.pool import EnginePool, beginning
from harness.driving.progress import Booted, Judged, Observer, Preparing, Started, Stepped
from harness.driving.results import Cost, Interrupted, RunResult, ScenarioResult, verdict_of
from harness.engines.engine import Engine
from harness.engines.errors import EngineError
from harness.engines.process import Launch

if TYPE_CHECKING:
    from harness.driving.oracle import Oracle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Driven:
    """A scenario whose witness was not asked yet. seconds: what the engine took."""

    scenario: Scenario
    trace: Trace
    seconds: float


@dataclass(slots=True)
class _Run:
    """The mutable middle of a run."""

    plan: Plan
    observers: Sequence[Observer]
    writer: RunWriter
    engines: EnginePool = field(init=False)
    oracles: dict[str, Future[Oracle]] = field(default_factory=dict)
    queue: JudgeQueue = field(default_factory=JudgeQueue)
    driven: list[_Driven] = field(default_factory=list)
    results: list[ScenarioResult] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    boot_seconds: float = 0.0
    #: scenarios that need an engine of their own and were not begun, in their order
    later: list[Scenario] = field(default_factory=list)
    #: boot configuration -> when the plan's time limit is over for it
    ends: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = f"SGLang {self.plan.env.version}"
        self.engines = EnginePool(
            logs=self.writer.folder,
            log_name="engine.log",
            lease=self.plan.lease,
            copies=self.plan.copies,
            ahead=self.plan.ahead,
            preparing=partial(self.preparing, name),
            booted=self.booted,
        )

    def preparing(self, name: str, text: str, log: Path) -> None:
        self.notify(Preparing(text=f"{name} {text}", log=log))

    def notify(self, event: Any) -> None:
        for observer in self.observers:
            observer(event)

    def booted(self, engine: Engine) -> None:
        self.boot_seconds += engine.boots_seconds
        self.header = self.header or dict(engine.handshakes[0])
        for handshake in engine.handshakes:
            self.writer.append_event({"event": "handshake", **handshake})
        self.notify(Booted(header=dict(engine.handshakes[0]), seconds=engine.boots_seconds))

    def settle(self, *, leave: int = 0) -> None:
        """Take judged scenarios in their order, until at most `leave` are still with the judge."""
        for result in self.queue.take(leave=leave):
            self.record(result)

    def record(self, result: ScenarioResult) -> None:
        self.results.append(result)
        self.notify(Judged(result=result))


def run(plan: Plan, *, observers: Sequence[Observer] = ()) -> RunResult:
    """Run every scenario of the plan and leave a run folder.

    Raises StoreError if the folder cannot be written, CheckpointError for a pair the reference cannot load. An engine
    that will not start makes its scenarios UNKNOWN; an engine that dies is a finding and is booted anew. Interrupted
    (a KeyboardInterrupt) with what was judged by then.
    """
    start = time.monotonic()
    writer = RunWriter.create(plan.root, manifest=_manifest(plan))
    going = _Run(plan=plan, observers=observers, writer=writer)
    try:
        with ThreadPoolExecutor(max_workers=1) as loader, going.queue:
            try:
                scenarios = in_boot_order(plan.scenarios)
                going.later = [*beginning(scenarios)]
                _prepare(going, scenarios)
                if plan.setup.reference != WITNESS:
                    going.oracles.update(_loading(plan, loader))
                for scenario in scenarios:
                    going.later = [one for one in going.later if one is not scenario]
                    if time.monotonic() < going.ends.get(scenario.boot_key(), math.inf):
                        _run_scenario(going, scenario)
                if going.driven:
                    _ask_witnesses(going)
            finally:
                going.engines.end()
            going.settle()
        verdict = verdict_of(going.results)
        writer.finish(verdict)
    except KeyboardInterrupt as stop:
        why = str(stop) or "interrupted"
        early = Interrupted(why, _result(going, _cut_off(going, why), time.monotonic() - start))
        early.add_note(_left_behind(going))
        raise early from stop
    except BaseException as error:
        error.add_note(_left_behind(going))
        raise
    finally:
        writer.close()
    return _result(going, verdict, time.monotonic() - start)


def _prepare(going: _Run, scenarios: Sequence[Scenario]) -> None:
    """SGLang's imports begin before the reference's own, which would hold up this process for seconds."""
    with contextlib.suppress(EngineError):  # it is said when the scenario's turn comes
        for scenario in scenarios[:1]:
            going.engines.prepare(going.plan.launch(scenario, lease=going.engines.lease))


def _loading(plan: Plan, loader: ThreadPoolExecutor) -> dict[str, Future[Oracle]]:
    """The reference of each pair; of a user's pair, which stands for several of ours, one, leased once."""
    setup = plan.setup
    once = {
        folders: loader.submit(load_oracle, *folders, setup.assumed, plan.place, setup.reference)
        for folders in dict.fromkeys(plan.pairs.values())
    }
    return {name: once[folders] for name, folders in plan.pairs.items()}


def in_boot_order(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Scenarios of one boot configuration behind each other, in order of first appearance: one engine for each."""
    first: dict[str, int] = {}
    for scenario in scenarios:
        first.setdefault(scenario.boot_key(), len(first))
    return sorted(scenarios, key=lambda scenario: first[scenario.boot_key()])


def _run_scenario(going: _Run, scenario: Scenario) -> None:
    """Drive it, and leave it with the judge; the engine is booted again only after it died."""
    going.settle(leave=1)
    number = len(going.results) + len(going.queue) + len(going.driven) + 1
    going.writer.append_event({"event": "scenario", "name": scenario.name, "id": scenario.id})
    going.notify(Started(scenario=scenario, index=number, total=len(going.plan.scenarios)))
    try:
        launch = going.plan.launch(scenario, lease=going.engines.lease)
        _wait_for(going, launch)
        start = time.monotonic()
        if going.plan.time_limit is not None:
            going.ends.setdefault(scenario.boot_key(), start + going.plan.time_limit)
        trace = _drive(going, scenario, launch)
    except EngineError as error:
        going.settle()
        going.record(_stored(going, unjudged(scenario, str(error), setup=going.plan.setup)))
        return
    seconds = time.monotonic() - start
    if going.plan.setup.reference == WITNESS:
        going.driven.append(_Driven(scenario=scenario, trace=trace, seconds=seconds))
    else:
        going.queue.put(partial(_judge, going, scenario, trace, seconds))


def _wait_for(going: _Run, launch: Launch) -> None:
    """The engine that a scenario needs is up, and those that come after it may boot."""
    upcoming = going.later[: going.engines.ahead]
    going.engines.expect([going.plan.launch(one, lease=going.engines.lease) for one in upcoming], now=launch)
    going.engines.use(launch)


def _drive(going: _Run, scenario: Scenario, launch: Launch) -> Trace:
    def on_step(scheduler_step: int, state: dict[str, Any]) -> None:
        going.writer.append_event({"event": "turn", "scheduler_step": scheduler_step, **state})
        going.notify(Stepped(scheduler_step=scheduler_step, state=state))
        going.settle(leave=1)

    return going.engines.drive(launch, scenario, on_step=on_step)


def _ask_witnesses(going: _Run) -> None:
    """The witness of every scenario that was driven, now that the engine under test is not needed any more."""
    from harness.driving.witness import plainest
    from harness.driving.witness_trace import ask  # the reference's trees, and so torch

    lost = dict[str, str]()  # boot configuration -> why it has no engine
    going.engines.preparing = partial(going.preparing, f"SGLang {going.plan.env.version}, as its own witness,")

    def on_step(name: str, scheduler_step: int, _state: dict[str, Any]) -> None:
        going.notify(Preparing(text=f"asking the witness ({name}, scheduler step {scheduler_step})"))

    def drive(asked: Scenario) -> Trace:
        key = asked.boot_key()
        if key in lost:
            raise EngineError(lost[key])
        try:
            launch = going.plan.launch(asked, lease=going.engines.lease)
            booting = time.monotonic()
            going.engines.use(launch)
            boots.append(time.monotonic() - booting)
            return going.engines.drive(launch, asked, on_step=partial(on_step, asked.name))
        except EngineError as error:
            lost[key] = str(error)
            raise

    for driven in sorted(going.driven, key=lambda one: plainest(one.scenario).boot_key()):
        start, boots = time.monotonic(), list[float]()
        reference = ask(driven.scenario, driven.trace, drive)
        going.driven.remove(driven)
        seconds = {"engine": driven.seconds, "reference": time.monotonic() - start - sum(boots)}
        going.queue.put(partial(_judge_witnessed, going, driven, reference, seconds))
        going.settle(leave=1)


def _judge_witnessed(going: _Run, driven: _Driven, reference: Trace, seconds: dict[str, float]) -> ScenarioResult:
    """Judge and store one scenario with what its witness said."""
    setup = going.plan.setup
    return _stored(going, judge_scenario(driven.scenario, driven.trace, reference, setup=setup, seconds=seconds))


def _judge(going: _Run, scenario: Scenario, trace: Trace, engine_seconds: float) -> ScenarioResult:
    """Judge and store one scenario; runs beside the engine, so it notifies nobody."""
    oracle = going.oracles[scenario.checkpoint].result()  # waiting for torch to load is not the reference's cost
    return _stored(going, judge_with(oracle, scenario, trace, setup=going.plan.setup, engine_seconds=engine_seconds))


def _stored(going: _Run, result: ScenarioResult) -> ScenarioResult:
    """The result with where its rows are now: on disk."""
    start = time.monotonic()
    folder = going.writer.save_scenario(
        result.scenario,
        engine=result.trace,
        reference=result.reference,
        verdict=result.verdict,
        divergences=result.divergences,
    )
    reproducer = result.save_reproducer(going.writer.folder, name=folder.name) if result.divergences else None
    seconds = {**result.seconds, "store": time.monotonic() - start}
    return replace(result.without_rows(), folder=folder, reproducer=reproducer, seconds=seconds)


def _result(going: _Run, verdict: Verdict, seconds: float) -> RunResult:
    setup = going.plan.setup
    return RunResult(
        folder=going.writer.folder,
        engine=setup.release,
        device=setup.device,
        revert=setup.revert,
        header=going.header,
        results=tuple(going.results),
        verdict=verdict,
        cost=_cost(going, seconds),
        pair=None if going.plan.own is None else going.plan.own.facts(),
    )


def _cut_off(going: _Run, why: str) -> Verdict:
    """The verdict of a run that was ended early: of what was judged, and UNKNOWN for the rest."""
    going.results += going.queue.finished()
    judged, total = len(going.results), len(going.plan.scenarios)
    rest = Verdict(outcome=Outcome.UNKNOWN, reasons=(f"{why}: {judged} of {counted(total, 'scenario')} judged",))
    return verdict_of(going.results, rest)


def _left_behind(going: _Run) -> str:
    folder = going.writer.folder
    judged = len(list(folder.glob(f"*/{VERDICT}")))  # the last one may be stored and not taken from the judge yet
    left = f"run folder {folder} is incomplete, {judged} of {counted(len(going.plan.scenarios), 'scenario')} judged"
    return f"{left}\n  look at those:  eaglecheck recheck {folder}" if judged else left


def _cost(going: _Run, total: float) -> Cost:
    spent = Counter[str]()
    for result in going.results:
        spent.update(result.seconds)
    ended = [one for one in going.oracles.values() if one.done() and not one.cancelled()]
    loaded = [one for one in ended if one.exception() is None]
    return Cost(
        boots=going.engines.boots,
        boot_seconds=going.boot_seconds,
        waited_seconds=going.engines.waited,
        engine_seconds=spent["engine"],
        reference_seconds=spent["reference"],
        reference_mib=max((one.result().peak_mib for one in loaded), default=0),
        reference_said_mib=going.plan.place.said or 0,
        judge_seconds=spent["judge"],
        store_seconds=spent["store"],
        total_seconds=total,
    )


def _manifest(plan: Plan) -> dict[str, Any]:
    head, dirty = git_state()
    setup = {name: getattr(plan.setup, name) for name in Setup.__slots__}
    return {
        "eaglecheck": own_version(),
        "argv": list(plan.argv),
        "git_head": head,
        "git_dirty": dirty,
        "host": platform.node(),
        "python": sys.version.split()[0],
        **({} if plan.own is None else {"pair": plan.own.facts()}),
        "engine": {**setup, "torch": plan.env.torch, "python": str(plan.env.python)},
    }
