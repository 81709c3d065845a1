"""Some scenarios of a soak, in its order and on one engine, over and over: for what does not come back alone.

    python -m benchmarks.again --engine 0.5.13 --family eagle3 --boots eagle3-tree --seed 28111134 --count 48
        --only 45,46 --times 40 --out FOLDER [--untraced] [--device cuda [--graphs]]
    python -m benchmarks.again --engine 0.5.13 --files FILE,FILE --out FOLDER …

The same seed, family, boots and count draw the scenarios that `benchmarks.soak` drew. Untraced: SGLang behind the gate,
with no hook on a worker or a model and no copy of a tensor. Ends at the first crash or hang, which it prints; exit code
1 then, else 0. --judge also says what the reference says of each, and keeps specimens of what failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.soak import booted_with, chosen_boots, plan
from cases.catalogue import read_scenario
from cases.families import FAMILIES
from harness.contract.trace import Trace
from harness.contract.types import Scenario
from harness.driving.live import LiveEngines
from harness.engines import envs


def chosen(scenarios: list[Scenario], only: str | None) -> list[Scenario]:
    """Those of the numbers named, counted from 0; all without names. ValueError for a number that is not there."""
    if only is None:
        return scenarios
    numbers = [int(number) for number in only.split(",")]
    missing = [number for number in numbers if not 0 <= number < len(scenarios)]
    if missing:
        raise ValueError(f"--only {missing[0]}: there are scenarios 0 to {len(scenarios) - 1}; raise --count")
    return [scenarios[number] for number in numbers]


def turns(scenarios: list[Scenario], *, times: int, until: float) -> Iterator[tuple[int, Scenario]]:
    """(round, scenario), until the clock of `time.monotonic` says so."""
    for round_number in range(times):
        for scenario in scenarios:
            if time.monotonic() >= until:
                return
            yield round_number, scenario


def trouble(trace: Trace) -> str | None:
    """What a crash or hang said of itself."""
    found = next((event for event in trace.events if event.name in ("crash", "hang")), None)
    if found is None:
        return None
    first = str(found.data.get("error", found.name)).splitlines()[0]
    return f"{first} at {found.data.get('site')}, round {found.data.get('round')}, tick {found.tick}"


def drawn(options: argparse.Namespace) -> list[Scenario]:
    """Those of the files, or of the soak that is named."""
    if options.files:
        return [read_scenario(Path(name)) for name in options.files.split(",")]
    boots = chosen_boots(options.family, options.boots, release=options.engine)
    return list(plan(boots, count=options.count, seed_value=options.seed))


def judged(engines: LiveEngines, scenario: Scenario, trace: Trace, *, out: Path) -> str:
    """The verdict, in a line; what failed is kept."""
    outcome = engines.judge(scenario, trace, release=engines.default, revert=None)
    if outcome.passed:
        return f"{scenario.name}: PASS, {outcome.verdict.compared}"
    kept = outcome.save_specimen(out)
    found = sorted({finding.signature for finding in outcome.findings})
    return f"{scenario.name}: {outcome.verdict.outcome} {found} {list(outcome.verdict.reasons)[:3]} {kept.name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--files", help="scenario files, comma-separated, in place of a soak's")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="eagle3")
    parser.add_argument("--boots")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--only", help="numbers of scenarios, counted from 0, in the order they shall run")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--untraced", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    scenarios = [booted_with(one, {"graphs": options.graphs}) for one in chosen(drawn(options), options.only)]
    engines = LiveEngines(
        environment=lambda version: envs.ensure(version, print),
        default=options.engine,
        device=options.device,
        logs=options.out / "logs",
    )
    ran, start = 0, time.monotonic()
    try:
        for number, scenario in turns(scenarios, times=options.times, until=start + 60 * options.minutes):
            launch = engines.launch(scenario, probe=not options.untraced)
            trace = engines.drive(launch, scenario)
            told = trouble(trace)
            ran += 1
            if options.judge and not options.untraced:
                print(judged(engines, scenario, trace, out=options.out), flush=True)
            if told is not None:
                print(f"CRASH in round {number}, {scenario.name} {scenario.id}, scenario {ran} of this engine: {told}")
                return 1
    finally:
        engines.close()
        way = "untraced" if options.untraced else "traced"
        print(f"{options.engine} {way}: {ran} scenarios on {engines.boots} boots in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
