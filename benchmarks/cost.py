"""What tracing and judging cost: the default scenarios through an untraced engine and through a traced, judged run.

    .venv/bin/python -m benchmarks.cost [--engine 0.5.23] [--repeats 3]

Both engines are up at once and take turns scenario by scenario, so that the machine's mood hits both. Prints ratios.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks._bench import booted, machine, oracle
from cases.fixed import default_scenarios
from harness.archive.writer import RunWriter
from harness.checks.judge import judge
from harness.contract.types import Scenario
from harness.driving.drive import drive
from harness.driving.oracle import Oracle
from harness.engines.engine import Engine
from harness.engines.envs import NEWEST

LIMIT = 1.25  # what the project promises


def untraced(engine: Engine, scenario: Scenario) -> float:
    start = time.perf_counter()
    drive(engine, scenario, record=False)
    return time.perf_counter() - start


def judged(engine: Engine, scenario: Scenario, reference: Oracle, writer: RunWriter) -> dict[str, float]:
    """Seconds by part: engine (with the probe recording), reference, judge, store."""
    marks = [time.perf_counter()]
    trace = drive(engine, scenario, on_turn=lambda tick, state: writer.append_event({"tick": tick, **state}))
    marks.append(time.perf_counter())
    answer = reference.answer(scenario, trace)
    marks.append(time.perf_counter())
    verdict, divergences = judge(scenario, trace, answer)
    marks.append(time.perf_counter())
    writer.save_scenario(scenario, engine=trace, reference=answer, verdict=verdict, divergences=divergences)
    marks.append(time.perf_counter())
    parts = [after - before for before, after in pairwise(marks)]
    return dict(zip(("engine", "reference", "judge", "store"), parts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default=NEWEST)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    scenarios = default_scenarios()
    reference = oracle()
    plain, parts = 0.0, dict.fromkeys(("engine", "reference", "judge", "store"), 0.0)
    with (
        booted(scenarios[0], version=options.engine, probe=False) as bare,
        booted(scenarios[0], version=options.engine, probe=True) as traced,
        tempfile.TemporaryDirectory() as folder,
    ):
        for scenario in scenarios:  # first use compiles nothing but fills caches on both sides
            untraced(bare, scenario)
            drive(traced, scenario)
        for repeat in range(options.repeats):
            reference._texts.clear()  # every repeat pays for the plain text again
            writer = RunWriter.create(Path(folder), manifest={"argv": [f"repeat {repeat}"]})
            for scenario in scenarios:
                plain += untraced(bare, scenario)
                for name, seconds in judged(traced, scenario, reference, writer).items():
                    parts[name] += seconds
            print(f"repeat {repeat + 1} of {options.repeats} done", flush=True)
    report(options.engine, plain, parts, repeats=options.repeats)


def report(version: str, plain: float, parts: dict[str, float], *, repeats: int) -> None:
    print(f"\nSGLang {version}, default scenarios, {repeats} repeats; {machine()}")
    print(f"{'part':<22}{'seconds':>9}{'ratio':>9}")
    print(f"{'untraced engine':<22}{plain:>9.2f}{1.0:>9.3f}")
    for name, seconds in parts.items():
        print(f"{name:<22}{seconds:>9.2f}{seconds / plain:>9.3f}")
    total = sum(parts.values())
    print(f"{'traced and judged':<22}{total:>9.2f}{total / plain:>9.3f}   (limit {LIMIT})")


if __name__ == "__main__":
    main()
