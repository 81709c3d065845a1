"""Scenarios judged on the one engine that a test worker, a night, a fuzz session or a mutant campaign keeps alive.

Tests are sorted by boot configuration so that one engine is enough. It must not import torch before a reference is
needed, and must not know about pytest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.contract.providers import AUTO, WITNESS
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.driving.drive import OnStep
from harness.driving.judging import JudgeQueue, judge_scenario, judge_with, load_oracle
from harness.driving.own_pair import OwnPair
from harness.driving.pairs import checkpoint_pairs
from harness.driving.plan import Setup
from harness.driving.pool import BorrowedPool, EnginePool, unobserved
from harness.driving.results import ScenarioResult
from harness.engines.envs import EngineEnv
from harness.engines.launch import CpuAttention
from harness.engines.process import Launch

if TYPE_CHECKING:
    from harness.driving.oracle import Oracle

#: Judged scenarios remembered a worker: several tests look at one run, generated ones are never asked for twice.
REMEMBERED = 64


@dataclass(slots=True, kw_only=True, repr=False)
class LiveEngines(EnginePool):
    """Drives and judges scenarios, one engine at a time. environment: release -> a ready EngineEnv, or it raises.

    assumed: ids of known issues that references take for granted. own: the user's pair. reference: who judges.
    """

    environment: Callable[[str], EngineEnv]
    default: str
    device: str
    assumed: tuple[str, ...] = ()
    own: OwnPair | None = None
    reference: str = AUTO
    #: whether CUDA graphs are captured with mutants in them
    mutants_in_graphs: bool = False
    #: the last result of the test that runs now, for its failure report
    latest: ScenarioResult | None = None
    _oracles: dict[tuple[str, tuple[str, ...]], Oracle] = field(default_factory=dict)
    _results: OrderedDict[tuple[Any, ...], ScenarioResult] = field(default_factory=OrderedDict)

    def launch(
        self,
        scenario: Scenario,
        *,
        engine: str | None = None,
        revert: int | None = None,
        probe: bool = True,
        cpu_attention: CpuAttention = "torch",
    ) -> Launch:
        """How the engine for this scenario is started; engine: a release, the session's own by default."""
        env = self.environment(engine or self.default)
        return self._setup(env.version, revert, cpu_attention).launch(
            scenario,
            env=env,
            folders=self._folders(scenario),
            own=self.own,
            lease=self.lease,
            probe=probe,
            mutants_in_graphs=self.mutants_in_graphs,
        )

    def _setup(self, release: str, revert: int | None, cpu_attention: CpuAttention) -> Setup:
        return Setup(
            release=release,
            device=self.device,
            revert=revert,
            cpu_attention=cpu_attention,
            assumed=self.assumed,
            pair=None if self.own is None else self.own.named,
            reference=self.reference,
        )

    def lent(self, **options: Any) -> EnginePool:
        """For a command that would make an EnginePool of its own."""
        return BorrowedPool(owner=self, **options)

    def judge(
        self,
        scenario: Scenario,
        trace: Trace,
        *,
        release: str,
        revert: int | None,
        cpu_attention: CpuAttention = "torch",
    ) -> ScenarioResult:
        """The reference's answer to a trace, and the verdict. A witness is driven for it, on the same pool."""
        setup = self._setup(release, revert, cpu_attention)
        if self.reference == WITNESS:
            from harness.driving.witness_trace import ask  # the reference's trees, and so torch

            def answer(asked: Scenario) -> Trace:
                return self.drive(self.launch(asked, engine=release, revert=revert, cpu_attention=cpu_attention), asked)

            return judge_scenario(scenario, trace, ask(scenario, trace, answer), setup=setup)
        return judge_with(self._oracle(scenario), scenario, trace, setup=setup)

    def stream(self, scenarios: Iterable[Scenario], *, engine: str, revert: int | None) -> Iterator[ScenarioResult]:
        """Results in order; each is judged while the engine is at the next scenario. Raises EngineError."""
        with JudgeQueue() as queue:
            for scenario in scenarios:
                launch = self.launch(scenario, engine=engine, revert=revert)
                trace = self.drive(launch, scenario)
                judged = partial(self.judge, scenario, trace, release=launch.boot["release"], revert=revert)
                if self.reference == WITNESS:
                    yield judged()  # needs the engine's place
                    continue
                queue.put(judged)
                yield from queue.take(leave=1)
            yield from queue.take()

    def _folders(self, scenario: Scenario) -> tuple[Path, Path]:
        """Of target and draft."""
        return checkpoint_pairs([scenario], device=self.device, own=self.own)[scenario.checkpoint]

    def _oracle(self, scenario: Scenario) -> Oracle:
        asked = (scenario.checkpoint, self.assumed)
        if asked not in self._oracles:
            target, draft = self._folders(scenario)
            self._oracles[asked] = load_oracle(target, draft, self.assumed, provider=self.reference)
        return self._oracles[asked]

    def __call__(
        self,
        scenario: Scenario,
        engine: str | None = None,
        revert: int | None = None,
        *,
        cpu_attention: CpuAttention = "torch",
        fresh: bool = False,
        on_step: OnStep | None = None,
    ) -> ScenarioResult:
        """Drive and judge. A run is remembered, since it repeats exactly, unless `fresh` or watched by `on_step`."""
        key = (engine or self.default, revert, scenario.id, cpu_attention)
        if not fresh and on_step is None and key in self._results:
            self.latest = self._results[key]
            return self.latest
        launch = self.launch(scenario, engine=engine, revert=revert, cpu_attention=cpu_attention)
        trace = self.drive(launch, scenario, on_step=on_step or unobserved)
        release = launch.boot["release"]
        self.latest = self.judge(scenario, trace, release=release, revert=revert, cpu_attention=cpu_attention)
        if on_step is None:
            self._results[key] = self.latest
            while len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
        return self.latest
