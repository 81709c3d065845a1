"""Generated scenarios a minute with one and with two workers, and how the cost a scenario grows with their number.

    .venv/bin/python -m benchmarks.throughput [--engine 0.5.23] [--scenarios 40] [--growth 1,10,100]

Boots are not counted. Only an otherwise idle machine says anything about the workers; the load is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._bench import machine
from cases.boots import BOOTS
from cases.generation import generate
from harness.archive.writer import RunWriter
from harness.contract.scenario import Scenario
from harness.driving.live import LiveEngines
from harness.engines import envs

#: What the project promises: two workers on two cores; judging against driving.
SPEED_UP, JUDGED_SHARE = 1.7, 0.25


def drawn(count: int, seed_value: int) -> list[Scenario]:
    return generate(BOOTS["plain"], count=count, seed=seed_value)


def work(release: str, scenarios: list[Scenario], ready: Any, reports: Any, folder: Path) -> None:
    """Boot, wait for the others, drive and judge everything; puts (start, end, positions, seconds by part, marks)."""
    engines = LiveEngines(
        environment=lambda version: envs.ensure(version, print), default=release, device="cpu", logs=folder
    )
    writer = RunWriter.create(folder / "runs", manifest={})
    spent = dict.fromkeys(("engine", "judged", "store"), 0.0)
    positions, marks = 0, []
    try:
        launch = engines.launch(scenarios[0])
        engines(scenarios[0], fresh=True)  # boots, loads the reference, warms both
        ready.wait()
        start = time.time()
        for scenario in scenarios:
            times = [time.perf_counter()]
            trace = engines.drive(launch, scenario)
            times.append(time.perf_counter())
            outcome = engines.judge(scenario, trace, release=release, revert=None)
            times.append(time.perf_counter())
            writer.save_scenario(
                scenario,
                engine=trace,
                reference=outcome.reference,
                verdict=outcome.verdict,
                divergences=outcome.divergences,
            )
            times.append(time.perf_counter())
            for name, before, after in zip(spent, times, times[1:], strict=False):
                spent[name] += after - before
            positions += outcome.verdict.compared.get("positions", 0)
            marks.append((time.time() - start, dict(spent)))
        reports.put((start, time.time(), positions, spent, marks))
    finally:
        engines.close()


def run(release: str, shares: list[list[Scenario]]) -> list[tuple[float, float, int, dict[str, float], list[Any]]]:
    """One process a share, all starting together; what each reported."""
    context = multiprocessing.get_context("spawn")
    ready, reports = context.Barrier(len(shares)), context.Queue()
    with tempfile.TemporaryDirectory(prefix="eaglecheck-throughput-") as folder:
        workers = [
            context.Process(target=work, args=(release, share, ready, reports, Path(folder, str(number))))
            for number, share in enumerate(shares)
        ]
        for worker in workers:
            worker.start()
        answers = [reports.get() for _ in workers]
        for worker in workers:
            worker.join()
    return answers


def rate(answers: list[Any], scenarios: int) -> tuple[float, float]:
    """(scenarios, positions) a minute over the time that any worker worked."""
    wall = max(answer[1] for answer in answers) - min(answer[0] for answer in answers)
    return 60 * scenarios / wall, 60 * sum(answer[2] for answer in answers) / wall


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default=envs.NEWEST)
    parser.add_argument("--scenarios", type=int, default=40)
    parser.add_argument("--growth", default="1,10,100")
    options = parser.parse_args()
    scenarios = drawn(options.scenarios, 1)
    rates = []
    for workers in (1, 2):
        answers = run(options.engine, [scenarios[number::workers] for number in range(workers)])
        rates.append(rate(answers, len(scenarios)))
        print(f"{workers} worker(s): {rates[-1][0]:.1f} scenarios, {rates[-1][1]:.0f} positions a minute; {machine()}")
    speed_up = rates[1][0] / rates[0][0]
    print(f"two workers are {speed_up:.2f} times as fast (promised {SPEED_UP})")
    sizes = [int(size) for size in options.growth.split(",")]
    ((_, _, _, spent, marks),) = run(options.engine, [drawn(max(sizes), 2)])
    for size in sizes:
        wall, parts = marks[min(size, len(marks)) - 1]
        each = ", ".join(f"{name} {1000 * seconds / size:.0f} ms" for name, seconds in parts.items())
        print(f"{size} scenarios in one run: {1000 * wall / size:.0f} ms each ({each}); {machine()}")
    share = (spent["judged"] + spent["store"]) / spent["engine"]
    print(f"judging and storing take {share:.2f} of the engine's own time (promised {JUDGED_SHARE})")
    return 0 if speed_up >= SPEED_UP and share <= JUDGED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
