"""Several processes that follow scenarios or ask mutants, each with engines of its own; results as they come.

It must not decide what is asked, and keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from harness.contract.scenario import Scenario
from harness.driving.live import LiveEngines
from harness.engines.envs import EngineEnv
from harness.search.executed import One, Sound, follow
from harness.search.fates import Asked, Fate
from harness.search.mutate import Hunt

Given = TypeVar("Given")
Came = TypeVar("Came")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every worker has. package: the release's own sglang, read and never written; folder: of the campaign.

    sounds: scenarios without a mutant.
    """

    env: EngineEnv
    package: Path
    device: str
    folder: Path
    seed: int
    examples: int
    sounds: tuple[Sound, ...] = ()


_hunt: Hunt


def _start(setup: Setup) -> None:
    """In a worker: engines end with their process, since whoever lost its control side ends itself."""
    global _hunt
    engines = LiveEngines(
        environment=lambda _version: setup.env,
        default=setup.env.version,
        device=setup.device,
        logs=setup.folder / "logs" / str(os.getpid()),
        copies=True,
    )
    _hunt = Hunt(
        engines=engines,
        package=setup.package,
        folder=setup.folder / "mutated",
        sounds=setup.sounds,
        seed=setup.seed,
        examples=setup.examples,
        release=setup.env.version,
    )


def _follow(one: tuple[str, Scenario]) -> One:
    return follow(_hunt.engines, one[1], one[0])


def _ask(mutant: Asked) -> Fate:
    return _hunt.ask(mutant)


def follow_all(setup: Setup, scenarios: Sequence[tuple[str, Scenario]], *, workers: int) -> Iterator[One]:
    """(family, scenario)s without a mutant, in whatever order they are done."""
    return _spread(setup, _follow, scenarios, workers=workers)


def ask_all(setup: Setup, mutants: Sequence[Asked], *, workers: int) -> Iterator[Fate]:
    """Fates as they are known."""
    return _spread(setup, _ask, mutants, workers=workers)


def _spread(setup: Setup, work: Callable[[Given], Came], given: Sequence[Given], *, workers: int) -> Iterator[Came]:
    """Whoever stops asking ends the workers, and with them their engines."""
    with get_context("spawn").Pool(workers, initializer=_start, initargs=(setup,)) as pool:
        yield from pool.imap_unordered(work, given)
