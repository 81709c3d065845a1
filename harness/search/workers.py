"""Several processes that follow scenarios or ask mutants, each with engines of its own; results as they come.

It must not decide what is asked, and keeps nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from queue import SimpleQueue

from harness.both_sides.leases import Request
from harness.contract.scenario import Scenario
from harness.driving.live import LiveEngines
from harness.engines.envs import EngineEnv
from harness.search.executed import One, Sound, follow, watch
from harness.search.mutant_results import Asked, Result
from harness.search.mutate import MutantRunner
from harness.search.tasks import Place, Task, Waiting, rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every worker has. package: the release's own sglang, read and never written; folder: of the campaign.

    sounds: scenarios without a mutant. lease: the share of a GPU that each engine takes.
    """

    env: EngineEnv
    package: Path
    place: Place
    folder: Path
    seed: int
    examples: int
    sounds: tuple[Sound, ...] = ()
    lease: Request | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """(family, scenario)s of one boot configuration of which nobody knows what they show, and those that were followed.

    canary: whether the release has SGLang's kv_canary.
    """

    known: tuple[One, ...]
    unknown: tuple[tuple[str, Scenario], ...]
    canary: bool

    def unwatched(self, new: Sequence[One] = ()) -> One | None:
        """The quickest, where nobody knows whether the canary can be on; None where somebody does, or there is none."""
        used = [one for one in (*self.known, *new) if not one.sound.why]
        if not self.canary or any(one.sound.canary is not None for one in used):
            return None
        return min(used, key=lambda one: one.sound.seconds, default=None)


#: What a worker was given, and what came of it.
_Came = tuple[list[Task], list[Result] | BaseException]
_runner: MutantRunner


def _start(setup: Setup) -> None:
    """In a worker: engines end with their process, since whoever lost its control side ends itself."""
    global _runner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks is interrupted, and ends its workers
    engines = LiveEngines(
        environment=lambda _version: setup.env,
        default=setup.env.version,
        device=setup.place.device,
        lease=setup.lease,
        logs=setup.folder / "logs" / str(os.getpid()),
        copies=True,
    )
    _runner = MutantRunner(
        engines=engines,
        package=setup.package,
        folder=setup.folder / "mutated" / str(os.getpid()),
        sounds=setup.sounds,
        release=setup.env.version,
    )


def _follow(boot: Boot) -> list[One]:
    """On one engine, and then on one with SGLang's own canary."""
    new = [follow(_runner.engines, scenario, family) for family, scenario in boot.unknown]
    if (quick := boot.unwatched(new)) is None:
        return new
    return [one for one in new if one is not quick] + [watch(_runner.engines, quick)]


def _ask(tasks: Sequence[Task]) -> list[Result]:
    return _runner.ask(tasks)


def follow_all(setup: Setup, boots: Sequence[Boot], *, workers: int) -> Iterator[list[One]]:
    """What is new of each boot configuration, in whatever order they are done."""
    with _pool(setup, workers) as pool:
        yield from pool.imap_unordered(_follow, boots)


def ask_all(
    setup: Setup, mutants: Sequence[Asked], known: dict[str, Result], *, explained: Collection[str], workers: int
) -> Iterator[Result]:
    """Fates as they are known: of a survivor once more after each boot configuration. known: by mutant, kept here."""
    every = rounds(
        mutants, setup.sounds, place=setup.place, examples=setup.examples, seed=setup.seed, explained=explained
    )
    waiting = Waiting(rounds=list(every), known=known)
    done: SimpleQueue[_Came] = SimpleQueue()
    busy = 0
    with _pool(setup, workers) as pool:
        while True:
            while busy < workers and (batch := waiting.take()):
                came = partial(_came, done, batch)
                pool.apply_async(_ask, (batch,), callback=came, error_callback=came)
                busy += 1
            if not busy:
                return
            batch, results = done.get()
            if isinstance(results, BaseException):
                raise results
            busy -= 1
            yield from waiting.give(batch, results)


def _came(done: SimpleQueue[_Came], batch: list[Task], came: list[Result] | BaseException) -> None:
    done.put((batch, came))


def _pool(setup: Setup, workers: int) -> Pool:
    """Whoever stops asking ends the workers, and with them their engines."""
    return get_context("spawn").Pool(workers, initializer=_start, initargs=(setup,))
