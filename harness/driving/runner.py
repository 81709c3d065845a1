"""Runs scenarios: one engine a boot configuration, then drive, reference, judge, store, for each of them.

It must not judge by itself and must not print; a run that cannot be judged is UNKNOWN, never silent.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.archive.run_folders import VERDICT
from harness.archive.store import SPECIMENS
from harness.archive.writer import RunWriter, write_specimen
from harness.both_sides.leases import Request
from harness.checks.findings import Finding, group
from harness.checks.judge import judge
from harness.contract.known_issues import Known
from harness.contract.merge import merge
from harness.contract.trace import ENDS, RowBuilder, Trace
from harness.contract.types import Divergence, Outcome, Scenario, Verdict
from harness.contract.words import counted
from harness.driving.drive import drive
from harness.driving.progress import (
    Booted,
    Cost,
    Judged,
    Observer,
    Preparing,
    RunResult,
    ScenarioResult,
    Started,
    Turned,
    known_of,
)
from harness.engines.engine import Engine
from harness.engines.envs import EngineEnv
from harness.engines.errors import EngineError, EngineNotClean, NoLease
from harness.engines.launch import CpuAttention, build_launch

if TYPE_CHECKING:
    from harness.driving.oracle import Oracle


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run and where. pairs: (target, draft) folders by scenario.checkpoint; own_pair: the user named them.

    lease: the share of a GPU that every engine takes first.
    """

    env: EngineEnv
    scenarios: tuple[Scenario, ...]
    pairs: dict[str, tuple[Path, Path]]
    root: Path
    device: str = "cpu"
    revert: int | None = None
    cpu_attention: CpuAttention = "torch"
    own_pair: bool = False
    lease: Request | None = None
    assumed: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()

    @property
    def named_pair(self) -> list[str] | None:
        """The folders that replace every scenario's own checkpoint; kept with the run, since replaying needs them."""
        return [str(folder) for folder in next(iter(self.pairs.values()))] if self.own_pair else None


class Interrupted(KeyboardInterrupt):
    """A run that somebody ended; `result`: the scenarios judged by then, never a PASS."""

    def __init__(self, why: str, result: RunResult) -> None:
        super().__init__(why)
        self.result = result


@dataclass(slots=True)
class _Session:
    """The mutable middle of a run."""

    plan: Plan
    observers: Sequence[Observer]
    writer: RunWriter
    #: what engines ask for; no waiting any more once it was in vain, or a run would wait anew for each scenario
    lease: Request | None
    oracles: dict[str, Future[Oracle]] = field(default_factory=dict)
    results: list[ScenarioResult] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    boots: int = 0
    boot_seconds: float = 0.0
    #: one thread that judges while the engine is at the next scenario, and what it has not given back yet, in order
    judges: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    unsettled: deque[Future[ScenarioResult]] = field(default_factory=deque)

    def tell(self, event: Any) -> None:
        for observer in self.observers:
            observer(event)

    def settle(self, *, leave: int = 0) -> None:
        """Take judged scenarios in their order, until at most `leave` are still with the judge."""
        while len(self.unsettled) > leave or (self.unsettled and self.unsettled[0].done()):
            _record(self, self.unsettled.popleft().result())


def run(plan: Plan, *, observers: Sequence[Observer] = ()) -> RunResult:
    """Run every scenario of the plan and leave a run folder.

    Raises StoreError if the folder cannot be written, CheckpointError for a pair the reference cannot load. An engine
    that will not start makes its scenarios UNKNOWN; an engine that dies is a finding and is booted anew. Interrupted
    (a KeyboardInterrupt) with what was judged by then.
    """
    start = time.monotonic()
    writer = RunWriter.create(plan.root, manifest=_manifest(plan))
    session = _Session(plan=plan, observers=observers, writer=writer, lease=plan.lease)
    try:
        with ThreadPoolExecutor(max_workers=1) as loader:
            for name, (target, draft) in plan.pairs.items():
                session.oracles[name] = loader.submit(_load_oracle, target, draft, session.plan.assumed)
            with session.judges:
                for scenarios in by_boot(plan.scenarios):
                    _run_group(session, scenarios)
                    session.settle()
        verdict = merge([result.verdict for result in session.results])
        writer.finish(verdict)
    except KeyboardInterrupt as stop:
        why = str(stop) or "interrupted"
        early = Interrupted(why, _result(session, _cut_off(session, why), time.monotonic() - start))
        early.add_note(_left_behind(session))
        raise early from stop
    except BaseException as error:
        error.add_note(_left_behind(session))
        raise
    finally:
        writer.close()
    return _result(session, verdict, time.monotonic() - start)


def _result(session: _Session, verdict: Verdict, seconds: float) -> RunResult:
    plan = session.plan
    return RunResult(
        folder=session.writer.folder,
        engine=plan.env.version,
        device=plan.device,
        revert=plan.revert,
        header=session.header,
        results=tuple(session.results),
        verdict=verdict,
        cost=_cost(session, seconds),
    )


def _cut_off(session: _Session, why: str) -> Verdict:
    """The verdict of a run that was ended early: of what was judged, and UNKNOWN for the rest."""
    while session.unsettled and session.unsettled[0].done():
        future = session.unsettled.popleft()
        if not future.cancelled() and future.exception() is None:
            session.results.append(future.result())
    judged, total = len(session.results), len(session.plan.scenarios)
    rest = Verdict(outcome=Outcome.UNKNOWN, reasons=(f"{why}: {judged} of {counted(total, 'scenario')} judged",))
    return merge([*(result.verdict for result in session.results), rest])


def _left_behind(session: _Session) -> str:
    folder = session.writer.folder
    judged = len(list(folder.glob(f"*/{VERDICT}")))  # the last one may be stored and not taken from the judge yet
    left = f"run folder {folder} is incomplete, {judged} of {counted(len(session.plan.scenarios), 'scenario')} judged"
    return f"{left}; look at those:  eaglecheck recheck {folder}" if judged else left


def by_boot(scenarios: Sequence[Scenario]) -> list[list[Scenario]]:
    """Scenarios grouped by boot configuration, in order of first appearance: one engine a group."""
    groups: dict[str, list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault(scenario.boot_key(), []).append(scenario)
    return list(groups.values())


def _load_oracle(target: Path, draft: Path, assumed: tuple[str, ...]) -> Oracle:
    from harness.driving.oracle import Oracle  # torch: imported while the engine boots

    return Oracle(target=target, draft=draft, assumed=assumed).load()


def _run_group(session: _Session, scenarios: Sequence[Scenario]) -> None:
    """All scenarios of one boot configuration; the engine is booted again only after it died."""
    with contextlib.ExitStack() as stack:
        engine: Engine | None = None
        for scenario in scenarios:
            session.settle(leave=1)
            number = len(session.results) + len(session.unsettled) + 1
            session.tell(Started(scenario=scenario, index=number, total=len(session.plan.scenarios)))
            try:
                if engine is None:
                    engine = stack.enter_context(_booted(session, scenario))
                try:
                    trace, seconds = _timed_drive(session, engine, scenario)
                except EngineNotClean:  # nothing of this scenario has run yet: a new engine, not a second try
                    engine.close()
                    engine = stack.enter_context(_booted(session, scenario))
                    trace, seconds = _timed_drive(session, engine, scenario)
            except EngineError as error:
                if isinstance(error, NoLease) and session.lease is not None:
                    session.lease = replace(session.lease, wait=0.0)
                if engine is not None:
                    engine.close()  # before the next one boots, which may need its card, its memory or its ports
                session.settle()
                _give_up(session, scenario, str(error))
                engine = None
                continue
            if any(event.name in ENDS for event in trace.events):
                engine.close()
                engine = None
            session.unsettled.append(session.judges.submit(_judge, session, scenario, trace, seconds))
            if engine is None:
                session.settle()


@contextlib.contextmanager
def _booted(session: _Session, scenario: Scenario) -> Iterator[Engine]:
    plan = session.plan
    target, draft = plan.pairs[scenario.checkpoint]
    launch = build_launch(
        env=plan.env,
        spec=scenario.spec,
        engine=scenario.engine,
        target=target,
        draft=draft,
        device=plan.device,
        revert=plan.revert,
        cpu_attention=plan.cpu_attention,
        assumed=plan.assumed,
        lease=session.lease,
    )
    log = session.writer.folder / "engine.log"
    engine = Engine(launch=launch, log=log)
    session.boots += 1
    try:
        engine.boot(progress=lambda text: session.tell(Preparing(text=f"SGLang {plan.env.version} {text}", log=log)))
        session.boot_seconds += engine.boots_seconds
        session.header = session.header or dict(engine.handshakes[0])
        for handshake in engine.handshakes:
            session.writer.append_event({"event": "handshake", **handshake})
        session.tell(Booted(header=dict(engine.handshakes[0]), seconds=engine.boots_seconds))
        yield engine
    finally:
        engine.close()


def _timed_drive(session: _Session, engine: Engine, scenario: Scenario) -> tuple[Trace, float]:
    start = time.monotonic()
    session.writer.append_event({"event": "scenario", "name": scenario.name, "id": scenario.id})

    def on_turn(tick: int, state: dict[str, Any]) -> None:
        session.writer.append_event({"event": "turn", "tick": tick, **state})
        session.tell(Turned(tick=tick, state=state))
        session.settle(leave=1)

    trace = drive(engine, scenario, on_turn=on_turn)
    return trace, time.monotonic() - start


def _judge(session: _Session, scenario: Scenario, engine: Trace, engine_seconds: float) -> ScenarioResult:
    """Judge and store one scenario; runs beside the engine, so it tells nobody."""
    marks = [time.monotonic()]
    oracle = session.oracles[scenario.checkpoint].result()
    marks[0] = time.monotonic()  # waiting for torch to load is not the reference's cost
    reference = oracle.answer(scenario, engine)
    marks.append(time.monotonic())
    verdict, divergences = judge(scenario, engine, reference)
    marks.append(time.monotonic())
    folder = session.writer.save_scenario(
        scenario, engine=engine, reference=reference, verdict=verdict, divergences=divergences
    )
    specimen = _specimen(session, scenario, engine, reference, divergences) if divergences else None
    marks.append(time.monotonic())
    from harness.contract.texts import text_identical

    findings = tuple(group(divergences))
    return ScenarioResult(
        scenario=scenario,
        verdict=verdict,
        divergences=tuple(divergences),
        findings=findings,
        known=_known(session, scenario, verdict, findings),
        folder=folder,
        specimen=specimen,
        text_identical=text_identical(engine, reference, scenario),
        rounds=len(engine.rounds),
        draft_steps=sum(record.forwards.get("DRAFT", 0) for record in engine.rounds),
        seconds={
            "engine": engine_seconds,
            "reference": marks[1] - marks[0],
            "judge": marks[2] - marks[1],
            "store": marks[3] - marks[2],
        },
    )


def _known(
    session: _Session, scenario: Scenario, verdict: Verdict, findings: Sequence[Finding]
) -> dict[str, tuple[Known, ...]]:
    plan = session.plan
    return known_of(scenario, verdict, findings, release=plan.env.version, device=plan.device)


def _specimen(
    session: _Session, scenario: Scenario, engine: Trace, reference: Trace, divergences: Sequence[Divergence]
) -> Path:
    folder = session.writer.folder / SPECIMENS / f"{scenario.name}-{scenario.id}"
    first = next((found for found in divergences if found.first), divergences[0])
    plan = session.plan
    header = {**engine.header, "release": plan.env.version, "device": plan.device, "assumed": list(plan.assumed)}
    header["cpu_attention"] = plan.cpu_attention
    if plan.own_pair:
        header["pair"] = plan.named_pair
    return write_specimen(
        folder,
        scenario,
        engine=replace(engine, header=header),
        reference=reference,
        divergences=divergences,
        signature=first.signature,
        replay=f"eaglecheck replay {folder}",
    )


def _give_up(session: _Session, scenario: Scenario, why: str) -> None:
    """A scenario without an engine: UNKNOWN with the reason, and stored like any other."""
    trace = Trace(side="engine", scenario_id=scenario.id, header={}, rows=RowBuilder().build())
    verdict = Verdict(outcome=Outcome.UNKNOWN, reasons=(why,))
    folder = session.writer.save_scenario(scenario, engine=trace, reference=None, verdict=verdict, divergences=[])
    _record(
        session,
        ScenarioResult(
            scenario=scenario,
            verdict=verdict,
            divergences=(),
            findings=(),
            known=_known(session, scenario, verdict, ()),
            folder=folder,
            specimen=None,
            text_identical=None,
            rounds=0,
            draft_steps=0,
            seconds={},
        ),
    )


def _record(session: _Session, result: ScenarioResult) -> None:
    session.results.append(result)
    session.tell(Judged(result=result))


def _cost(session: _Session, total: float) -> Cost:
    spent = Counter[str]()
    for result in session.results:
        spent.update(result.seconds)
    return Cost(
        boots=session.boots,
        boot_seconds=session.boot_seconds,
        engine_seconds=spent["engine"],
        reference_seconds=spent["reference"],
        judge_seconds=spent["judge"],
        store_seconds=spent["store"],
        total_seconds=total,
    )


def _manifest(plan: Plan) -> dict[str, Any]:
    head, dirty = git_state()
    return {
        "eaglecheck": own_version(),
        "argv": list(plan.argv),
        "git_head": head,
        "git_dirty": dirty,
        "host": platform.node(),
        "python": sys.version.split()[0],
        "engine": {
            "release": plan.env.version,
            "device": plan.device,
            "revert": plan.revert,
            "torch": plan.env.torch,
            "python": str(plan.env.python),
            "cpu_attention": plan.cpu_attention,
            "pair": plan.named_pair,
            "assumed": list(plan.assumed),
        },
    }


def own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("eaglecheck")
    except PackageNotFoundError:
        return "unknown"


def git_state() -> tuple[str, bool | None]:
    """Head and dirtiness of our own checkout; empty where eaglecheck does not run from one."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        head = subprocess.run(
            ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
        status = subprocess.run(
            ["git", "-C", here, "status", "--porcelain"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", None
    if head.returncode:
        return "", None
    return head.stdout.strip(), bool(status.stdout.strip())
