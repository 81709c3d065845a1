"""One job of `benchmarks.gpu` in a process of its own: an engine on the card, scenarios, and a JSON document.

python -m benchmarks.gpu_jobs generated NAME --count 50 --seed 1 --engine 0.5.13 --out FOLDER --json FILE
python -m benchmarks.gpu_jobs cost graphs --engine 0.5.13 --out FOLDER --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_combinations import COMBINATIONS, TREES, Combination
from benchmarks.gpu_cost import cost, line_of, scenarios_for
from benchmarks.gpu_numbers import Numbers
from cases.hunt import Hunt, as_json, greedy_text
from cases.strategies import BOOTS, programs
from harness.both_sides import leases
from harness.both_sides.mutants import MUTANTS
from harness.contract.trace import Trace
from harness.driving.live import LiveEngines
from harness.engines import envs
from harness.engines.errors import EngineError
from harness.search.mutants import Campaign
from harness.search.scoreboard import document


def generated(options: argparse.Namespace, engines: LiveEngines) -> dict[str, Any]:
    """Scenarios of one combination until they are done or the time is over."""
    chosen = COMBINATIONS[options.name]
    boot = {**BOOTS, **TREES}[chosen.boot]
    folder = options.out / "runs" / f"generated-{options.name}"
    hunt = Hunt(engines=engines, release=options.engine, folder=folder, revert=options.revert)
    engines.assumed = boot.assumes
    drawn = programs(boot, count=options.count, seed_value=options.seed, greedy=greedy_text(boot))
    start = time.monotonic()
    decided: list[tuple[int, int]] = []
    graphs: dict[str, int] = {}
    error, numbers, apart = "", Numbers(), 0.0
    outcomes = hunt.drive_all(chosen.of(scenario, options) for scenario in drawn)
    while True:
        try:
            outcome = next(outcomes, None)
        except EngineError as failure:
            error = str(failure)
            break
        if outcome is None:
            break
        mark = time.monotonic()
        if outcome.passed:
            numbers.add(outcome.trace, outcome.reference)
        asked = outcome.verdict.compared.get("proposals", 0) + outcome.verdict.compared.get("accepts", 0)
        decided.append((outcome.verdict.ties, asked))
        for phase, count in in_graphs(outcome.trace).items():
            graphs[phase] = graphs.get(phase, 0) + count
        apart += time.monotonic() - mark  # what only this benchmark asks for
        if time.monotonic() - start > options.limit:
            error = f"stopped after {options.limit} s"
            break
    wall = time.monotonic() - start
    engine = engines.engine_seconds
    spent = {"engine": engine, "judged": wall - engine - sum(engines.boot_seconds) - apart}
    header = engines.header
    return {
        **as_json(hunt),
        "combination": dataclasses.asdict(chosen),
        "header": header,
        "in_graphs": graphs,
        "engine_error_over_own": numbers.summary(),
        "ties": sum(ties for ties, _ in decided),
        "choices": sum(choices for _, choices in decided),
        "ties_of_choices": decided,
        "spent": spent,
        "boot_seconds": engines.boot_seconds,
        "wall": wall,
        "error": error,
    }


def in_graphs(trace: Trace) -> dict[str, int]:
    """Rounds by phase and how they ran: 'DRAFT in 4' for a graph of four requests, 'DRAFT eager'."""
    found: dict[str, int] = {}
    for record in trace.rounds:
        for phase in record.forwards:
            how = f"{phase} in {record.graphs[phase]}" if phase in record.graphs else f"{phase} eager"
            found[how] = found.get(how, 0) + 1
    return found


def mutants(options: argparse.Namespace, engines: LiveEngines) -> dict[str, Any]:
    """The mutants of --only, eagerly or in graphs; as `eaglecheck mutants`, beside engines without leases."""
    faults = [MUTANTS[name] for name in options.only.split(",")]
    knobs = {"graphs": True} if options.name == "graphs" else {}
    engines.mutants_in_graphs = bool(knobs)
    return document(Campaign(engines, options.engine, faults, print, knobs).run())


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Nobody else of this run measures meanwhile."""
    with (out / "measuring").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _worker(options: argparse.Namespace, number: int, gates: Any, told: Any) -> None:
    """Boot, then work on the same scenarios whenever there are more than `number` workers."""
    engines = _engines(options, f"workers-{number}")
    boot = BOOTS["plain"]
    scenarios = [
        COMBINATIONS["plain-graphs"].of(one, options) for one in programs(boot, count=options.count, seed_value=7)
    ]
    try:
        engines(scenarios[0], fresh=True)
        for workers in crowds(options):
            gates.wait()
            start = time.monotonic()
            if number < workers:
                for scenario in scenarios:
                    engines(scenario, fresh=True)
                told.put((workers, start, time.monotonic()))
            gates.wait()
    finally:
        engines.close()


def crowds(options: argparse.Namespace) -> list[int]:
    return [int(count) for count in options.workers.split(",")]


def workers(options: argparse.Namespace) -> dict[str, Any]:
    """Scenarios a minute with 1, 2 and 4 workers, each with its own engine, on one card."""
    context = multiprocessing.get_context("spawn")
    most = max(crowds(options))
    gates, told = context.Barrier(most + 1), context.Queue()
    processes = [context.Process(target=_worker, args=(options, n, gates, told)) for n in range(most)]
    for process in processes:
        process.start()
    rates = {}
    with contextlib.ExitStack() as stack:
        for place, count in enumerate(crowds(options)):
            if not place:
                while gates.n_waiting < most:
                    time.sleep(0.1)
                stack.enter_context(alone(options.out))
            gates.wait()
            spans = [told.get() for _ in range(count)]
            gates.wait()
            wall = max(span[2] for span in spans) - min(span[1] for span in spans)
            rates[count] = round(60 * count * options.count / wall, 1)
    for process in processes:
        process.join()
    return {"scenarios_a_minute": rates, "scenarios_each": options.count}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generated", "cost", "workers", "mutants"))
    parser.add_argument("name")
    parser.add_argument("--engine", default="0.5.13")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no scenario is begun")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="cpu only rehearses")
    parser.add_argument(
        "--levels", default="off,tokens,full", help="probe levels (and resting), the untraced one first"
    )
    parser.add_argument("--each", type=int, default=1, help="engines of each level")
    parser.add_argument("--together", type=int, default=1, help="jobs that must have booted before any is measured")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that they are waited for")
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--revert", type=int, help="pull request whose fix SGLang shall take out again")
    parser.add_argument("--only", default="", help="which mutants, comma-separated")
    parser.add_argument("--share", type=float, help="GiB of the card that each engine leases; none by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.what == "cost":
        chosen = scenarios_for(
            options.name, lambda one, graphs: Combination(boot="plain", graphs=graphs).of(one, options)
        )
        found = cost(options, chosen, lambda level: _engines(options, f"cost-{options.name}-{level}"), alone)
        print(line_of(found))
    elif options.what == "workers":
        found = workers(options)
    elif options.what == "mutants":
        engines = _engines(options, f"mutants-{options.name}")
        try:
            found = mutants(options, engines)
        finally:
            engines.close()
    else:
        engines = _engines(options, f"generated-{options.name}")
        try:
            found = generated(options, engines)
        finally:
            engines.close()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1, default=str))
    return 0


def _engines(options: argparse.Namespace, name: str) -> Timed:
    return Timed(
        environment=lambda version: envs.ensure(version, print),
        default=options.engine,
        device=options.device,
        logs=options.out / "logs" / name,
        lease=leases.request(options.share) if options.share else None,
    )


class Timed(LiveEngines):
    """Live engines that remember what driving and booting took, and the last handshake."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.engine_seconds, self.boot_seconds = 0.0, []
        self.header: dict[str, Any] = {}

    def use(self, launch: Any) -> Any:
        boots, start = self.boots, time.monotonic()
        engine = super().use(launch)
        if self.boots > boots:
            took = time.monotonic() - start
            self.boot_seconds.append(round(took, 1))
            self.engine_seconds -= took  # a boot is no part of driving
        self.header = dict(engine.handshakes[0])
        return engine

    def drive(self, *args: Any, **kwargs: Any) -> Trace:
        start = time.monotonic()
        try:
            return super().drive(*args, **kwargs)
        finally:
            self.engine_seconds += time.monotonic() - start


if __name__ == "__main__":
    raise SystemExit(main())
