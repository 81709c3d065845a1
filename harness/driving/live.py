"""The one engine a test worker keeps alive, and scenarios judged on it.

It must never hold two engines at a time: tests are sorted by boot configuration so that one is enough. It must not
import torch before a reference is needed, and must not know about pytest.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.archive.store import SPECIMENS
from harness.archive.writer import write_specimen
from harness.both_sides.leases import Request
from harness.checks.findings import Finding, group
from harness.checks.judge import judge
from harness.contract.known_issues import Known
from harness.contract.trace import ENDS, Trace
from harness.contract.types import Divergence, Outcome, Scenario, Verdict
from harness.driving.drive import OnTurn, drive
from harness.driving.pairs import checkpoint_pairs
from harness.driving.progress import known_of
from harness.engines.engine import Engine
from harness.engines.envs import EngineEnv
from harness.engines.errors import EngineNotClean, NoLease
from harness.engines.fork_server import ForkServers, can_fork
from harness.engines.launch import CpuAttention, ProbeLevel, build_launch
from harness.engines.process import Launch

if TYPE_CHECKING:
    from harness.driving.oracle import Oracle

#: Judged scenarios remembered a worker: several tests look at one run, generated ones are never asked for twice.
REMEMBERED = 64
#: What a trace says of engines that were started so.
COPIES = "copied processes"


def _unwatched(_tick: int, _state: dict[str, Any]) -> None:
    """No observer."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScenarioOutcome:
    """One scenario driven on one engine and judged. text_identical: see `harness.driving.oracle.text_identical`."""

    scenario: Scenario
    release: str
    revert: int | None
    trace: Trace
    reference: Trace
    verdict: Verdict
    divergences: tuple[Divergence, ...]
    findings: tuple[Finding, ...]
    text_identical: bool | None
    #: how the engine and the reference were started, which a replay repeats
    assumed: tuple[str, ...] = ()
    cpu_attention: CpuAttention = "torch"

    def __repr__(self) -> str:
        reverted = f" with {self.revert} reverted" if self.revert else ""
        return f"<scenario {self.scenario.name} on SGLang {self.release}{reverted}: {self.verdict.outcome}>"

    @property
    def first(self) -> Divergence | None:
        """The earliest divergence that nothing else explains."""
        return next((found for found in self.divergences if found.first), None)

    @property
    def known(self) -> dict[str, tuple[Known, ...]]:
        """The known issues that its findings may be."""
        device = str(self.trace.header.get("device", ""))
        return known_of(self.scenario, self.verdict, self.findings, release=self.release, device=device)

    @property
    def passed(self) -> bool:
        return self.verdict.outcome is Outcome.PASS

    def properties(self) -> list[tuple[str, object]]:
        """What a JUnit file says of a test that drove this, beside passed or failed."""
        found: list[tuple[str, object]] = [
            ("eaglecheck.engine", self.release),
            ("eaglecheck.scenario", f"{self.scenario.name}-{self.scenario.id}"),
            ("eaglecheck.verdict", str(self.verdict.outcome)),
        ]
        if self.first is None:
            return found
        known = self.known.get(self.first.signature, ())
        found.append(("eaglecheck.signature", self.first.signature))
        return found + ([("eaglecheck.known", ", ".join(one.id for one in known))] if known else [])

    def save_specimen(self, root: Path) -> Path:
        """A folder that `eaglecheck replay` runs again, where there is something to look at."""
        name = f"{self.scenario.name}-{self.scenario.id}-{self.release}" + (f"-r{self.revert}" if self.revert else "")
        folder = root / SPECIMENS / name
        header = {**self.trace.header, "release": self.release}
        header |= {"assumed": list(self.assumed), "cpu_attention": self.cpu_attention}
        return write_specimen(
            folder,
            self.scenario,
            engine=replace(self.trace, header=header),
            reference=self.reference,
            divergences=self.divergences,
            signature=self.first.signature if self.first else str(self.verdict.outcome),
            replay=f"eaglecheck replay {folder}",
        )


@dataclass(slots=True, kw_only=True, repr=False)
class LiveEngines:
    """Boots, reuses and ends engines, one at a time. environment: release -> a ready EngineEnv, or it raises."""

    environment: Callable[[str], EngineEnv]
    default: str
    device: str
    logs: Path
    #: fork SGLang's processes from the host (see harness.engine_side.host.fork_server), on a CPU and without ranks
    copies: bool = False
    #: the share of a GPU that every engine takes first; waited for until it was in vain once
    lease: Request | None = None
    #: ids of known issues that references take for granted
    assumed: tuple[str, ...] = ()
    #: whether CUDA graphs are captured with mutants in them
    mutants_in_graphs: bool = False
    boots: int = 0
    #: the last outcome of the test that runs now, for its failure report
    latest: ScenarioOutcome | None = None
    _engine: Engine | None = None
    _fork_servers: ForkServers | None = None
    _key: str = ""
    _oracles: dict[str, Oracle] = field(default_factory=dict)
    _outcomes: OrderedDict[tuple[Any, ...], ScenarioOutcome] = field(default_factory=OrderedDict)

    def launch(
        self,
        scenario: Scenario,
        *,
        engine: str | None = None,
        revert: int | None = None,
        probe: ProbeLevel | bool = "full",
        cpu_attention: CpuAttention = "torch",
    ) -> Launch:
        """How the engine for this scenario is started; engine: a release, the session's own by default."""
        env = self.environment(engine or self.default)
        target, draft = checkpoint_pairs([scenario], device=self.device)[scenario.checkpoint]
        return build_launch(
            env=env,
            spec=scenario.spec,
            engine=scenario.engine,
            target=target,
            draft=draft,
            device=self.device,
            probe=probe,
            revert=revert,
            cpu_attention=cpu_attention,
            assumed=self.assumed,
            lease=self.lease,
            mutants_in_graphs=self.mutants_in_graphs,
        )

    def use(self, launch: Launch) -> Engine:
        """The live engine if it is this one, else this one booted in its place. Raises EngineError."""
        launch = self._quick(launch)
        boot = {name: value for name, value in launch.boot.items() if name != "lease"}
        key = json.dumps([str(launch.python), *map(str, launch.pythonpath), boot], sort_keys=True)
        if self._engine is None or self._key != key or not self._alive():
            self.close()
            self.boots += 1
            log = self.logs / f"engine-{self.boots}.log"
            engine = self._forked(launch, log) if can_fork(launch) else Engine(launch=launch, log=log)
            try:
                engine.boot()
            except NoLease:
                if self.lease is not None:
                    self.lease = replace(self.lease, wait=0.0)
                raise
            self._engine, self._key = engine, key
        return self._engine

    def _quick(self, launch: Launch) -> Launch:
        """The launch with the way of starting that this session wants, for both sides of a pair."""
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

    def _alive(self) -> bool:
        return self._engine is not None and self._engine.process is not None and self._engine.process.poll() is None

    def drive(self, launch: Launch, scenario: Scenario, *, record: bool = True, on_turn: OnTurn | None = None) -> Trace:
        """The engine's trace of one scenario; an engine that died, hung or refused is not used again."""
        watch = on_turn or _unwatched
        with self._dropped_on_error():
            try:
                trace = drive(self.use(launch), scenario, record=record, on_turn=watch)
            except EngineNotClean:  # nothing of this scenario has run yet
                self.close()
                trace = drive(self.use(launch), scenario, record=record, on_turn=watch)
        if any(event.name in ENDS for event in trace.events):
            self.close()
        return trace

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # a time-out or Ctrl-C in the middle of a turn leaves the engine in no known state
            self.close()
            raise

    def judge(
        self,
        scenario: Scenario,
        trace: Trace,
        *,
        release: str,
        revert: int | None,
        cpu_attention: CpuAttention = "torch",
    ) -> ScenarioOutcome:
        """The reference's answer to a trace, and the verdict."""
        from harness.contract.texts import text_identical

        reference = self._oracle(scenario).answer(scenario, trace)
        verdict, divergences = judge(scenario, trace, reference)
        return ScenarioOutcome(
            scenario=scenario,
            release=release,
            revert=revert,
            trace=trace,
            reference=reference,
            verdict=verdict,
            divergences=tuple(divergences),
            findings=tuple(group(divergences)),
            text_identical=text_identical(trace, reference, scenario),
            assumed=self.assumed,
            cpu_attention=cpu_attention,
        )

    def stream(self, scenarios: Iterable[Scenario], *, engine: str, revert: int | None) -> Iterator[ScenarioOutcome]:
        """Outcomes in order; each is judged while the engine is at the next scenario. Raises EngineError."""
        waiting: Future[ScenarioOutcome] | None = None
        with ThreadPoolExecutor(max_workers=1) as judges:
            for scenario in scenarios:
                launch = self.launch(scenario, engine=engine, revert=revert)
                trace = self.drive(launch, scenario)
                before, waiting = (
                    waiting,
                    judges.submit(self.judge, scenario, trace, release=launch.boot["release"], revert=revert),
                )
                if before is not None:
                    yield before.result()
            if waiting is not None:
                yield waiting.result()

    def _oracle(self, scenario: Scenario) -> Oracle:
        if scenario.checkpoint not in self._oracles:
            from harness.driving.oracle import Oracle  # torch

            target, draft = checkpoint_pairs([scenario], device=self.device)[scenario.checkpoint]
            self._oracles[scenario.checkpoint] = Oracle(target=target, draft=draft, assumed=self.assumed).load()
        return self._oracles[scenario.checkpoint]

    def __call__(
        self,
        scenario: Scenario,
        engine: str | None = None,
        revert: int | None = None,
        *,
        cpu_attention: CpuAttention = "torch",
        fresh: bool = False,
        on_turn: OnTurn | None = None,
    ) -> ScenarioOutcome:
        """Drive and judge. A run is remembered, since it repeats exactly, unless `fresh` or watched by `on_turn`."""
        key = (engine or self.default, revert, scenario.id, cpu_attention)
        if fresh or on_turn is not None or key not in self._outcomes:
            launch = self.launch(scenario, engine=engine, revert=revert, cpu_attention=cpu_attention)
            trace = self.drive(launch, scenario, on_turn=on_turn)
            release = launch.boot["release"]
            outcome = self.judge(scenario, trace, release=release, revert=revert, cpu_attention=cpu_attention)
            if on_turn is None:
                self._remember(key, outcome)
            self.latest = outcome
        else:
            self.latest = self._outcomes[key]
        return self.latest

    def _remember(self, key: tuple[Any, ...], outcome: ScenarioOutcome) -> None:
        self._outcomes[key] = outcome
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)


@dataclass(slots=True)
class Borrowed:
    """What a command gets as its `Engine` while it runs on the worker's live one: boots into it, leaves it running."""

    engines: LiveEngines
    launch: Launch
    _engine: Engine | None = None

    def boot(self, *, progress: Callable[[str], None] = lambda _text: None) -> None:
        self._engine = self.engines.use(self.launch)

    def close(self) -> None:
        self._engine = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
