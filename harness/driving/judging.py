"""Judges one scenario: asks the reference, runs the checks, gives one result. All commands judge through it.

It must not know an engine. Importing it does not import torch; the first reference does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checks.explained import event, spot
from harness.checks.judge import judge
from harness.contract.providers import AUTO
from harness.contract.rows import RowBuilder
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Divergence, Outcome, Verdict
from harness.contract.usage import UsageError
from harness.driving.checkpoint_files import OWN
from harness.driving.own_pair import OwnPair
from harness.driving.plan import CPU, Place, Setup
from harness.driving.results import ScenarioResult

if TYPE_CHECKING:
    from harness.driving.oracle import Oracle


def judge_scenario(
    scenario: Scenario,
    trace: Trace,
    reference: Trace | None,
    *,
    setup: Setup,
    seconds: Mapping[str, float] | None = None,
    **stored: Any,
) -> ScenarioResult:
    """The verdict over both sides' rows; without a reference only what needs none is judged.

    stored: folder and reproducer, where it is stored already.
    """
    start = time.monotonic()
    verdict, divergences = judge(scenario, trace, reference)
    spent = {**seconds, "judge": time.monotonic() - start} if seconds else {}
    return ScenarioResult.of(scenario, trace, reference, verdict, divergences, setup=setup, seconds=spent, **stored)


def judge_with(
    oracle: Oracle, scenario: Scenario, trace: Trace, *, setup: Setup, engine_seconds: float = 0.0, **stored: Any
) -> ScenarioResult:
    """The same with the reference's own answer to the trace, and which known issues explain what is wrong."""
    start = time.monotonic()
    reference = oracle.answer(scenario, trace)
    seconds = {"engine": engine_seconds, "reference": time.monotonic() - start}

    def judged(reference: Trace) -> ScenarioResult:
        return judge_scenario(scenario, trace, reference, setup=setup, seconds=seconds, **stored)

    result = judged(reference)
    told = [event(issue, _gone(oracle.following(issue), result)) for issue in _candidates(result)]
    return judged(replace(reference, events=(*reference.events, *told))) if told else result


def _candidates(result: ScenarioResult) -> list[str]:
    """Issues that the reference can follow and that a root may be; none where there is one root, of one issue."""
    known = [result.known.get(one.signature, ()) for one in result.findings if one.is_root]
    open_ones = len(known) > 1 or any(len(may_be) > 1 for may_be in known)
    return sorted({one.id for may_be in known for one in may_be if one.predicted}) if open_ones else []


def _gone(oracle: Oracle, result: ScenarioResult) -> list[Divergence]:
    """The roots that a reference which follows an issue does not have, where nothing that follows from them is left."""
    _, divergences = judge(result.scenario, result.trace, oracle.answer(result.scenario, result.trace))
    left = set(map(spot, divergences))
    still = {found.cause or found.signature for found in result.divergences if spot(found) in left}
    return [found for found in result.divergences if not found.cause and found.signature not in still]


def unjudged(scenario: Scenario, why: str, *, setup: Setup) -> ScenarioResult:
    """A scenario without an engine: UNKNOWN with the reason."""
    trace = Trace(side="engine", scenario_id=scenario.id, header={}, rows=RowBuilder().build())
    verdict = Verdict(outcome=Outcome.UNKNOWN, reasons=(why,))
    return ScenarioResult.of(scenario, trace, None, verdict, (), setup=setup)


def load_oracle(
    target: Path, draft: Path, assumed: tuple[str, ...], place: Place = CPU, provider: str = AUTO
) -> Oracle:
    """A pair's reference, loaded; CheckpointError for a pair it cannot load.

    What `load_now` read before the engine's boot is not read again.
    """
    from harness.driving.oracle import Oracle  # torch: imported while an engine boots

    ahead = _ahead.pop((target, draft, assumed, place, provider), None)
    made = ahead or Oracle(target=target, draft=draft, assumed=assumed, place=place, provider=provider)
    return made.load(held=place.held)


class NoProviderError(UsageError):
    """A pair that no provider of rows knows: whether the witness judges it is another question. why: what each said."""

    def __init__(self, *, asked: str, why: str) -> None:
        super().__init__(
            f"--reference {asked} does not know this pair: {why}\n  --reference witness needs no knowledge"
        )
        self.why = why


def load_now(pair: OwnPair, *, assumed: tuple[str, ...] = (), place: Place = CPU, provider: str = AUTO) -> str:
    """Read the user's pair as a run will that comes next, before any engine is booted; why its target is not ours.

    NoProviderError where it is of a kind that is not built; UsageError where it is damaged.
    """
    from reference.checkpoint import CheckpointError, DamagedError  # torch

    try:
        oracle = load_oracle(*pair.folders, assumed, place, provider)
    except DamagedError as error:
        raise UsageError(f"--target and --draft cannot be used: {error}\n  {OWN}") from error
    except CheckpointError as error:
        raise NoProviderError(asked=provider, why=str(error)) from error
    _ahead[*pair.folders, assumed, place, provider] = oracle
    return oracle.not_ours


_ahead: dict[tuple[Path, Path, tuple[str, ...], Place, str], Oracle] = {}


@dataclass(slots=True)
class JudgeQueue:
    """One thread that judges while the engine is at the next scenario, and what it has not given back yet, in order."""

    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    _waiting: deque[Future[ScenarioResult]] = field(default_factory=deque)

    def __enter__(self) -> JudgeQueue:
        return self

    def __exit__(self, *_error: object) -> None:
        self._thread.shutdown()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Callable[[], ScenarioResult]) -> None:
        """To be judged when the thread comes to it."""
        self._waiting.append(self._thread.submit(work))

    def take(self, *, leave: int = 0) -> Iterator[ScenarioResult]:
        """Results in their order, until at most `leave` are still with the judge; raises what judging raised."""
        while len(self._waiting) > leave or (self._waiting and self._waiting[0].done()):
            yield self._waiting.popleft().result()

    def finished(self) -> Iterator[ScenarioResult]:
        """Of a run that is over: what was judged by now, without waiting and without what failed."""
        while self._waiting and self._waiting[0].done():
            future = self._waiting.popleft()
            if not future.cancelled() and future.exception() is None:
                yield future.result()
