"""How many generated scenarios until a known bug is found: the default boot configuration, over many seeds.

    .venv/bin/python -m benchmarks.time_to_detect [--seeds 20] [--only 0.5.11,0.5.23+26329]

A scenario counts as a detection if a root finding has the kind that the corpus lists for the bug. Exit code 1 if a
median is above the promise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks._bench import machine
from cases import catalogue
from cases.boots import BOOTS
from cases.generation import generate
from harness.driving.live import LiveEngines
from harness.engines import envs

#: What the project promises: the median over the seeds.
PROMISE = 5
#: A seed that needs more counts as this many plus one.
MOST = 25

#: (corpus case, release, revert)
BUGS = (
    ("pr25015", "0.5.11", None),
    ("pr26329", "0.5.12.post1", None),
    ("pr25015", "0.5.13", 25015),
    ("pr26329", "0.5.13", 26329),
    ("pr25015", "0.5.23", 25015),
    ("pr26329", "0.5.23", 26329),
)


def scenarios_needed(engines: LiveEngines, case: catalogue.Case, release: str, revert: int | None, seed: int) -> int:
    """Number of the first generated scenario that shows the bug."""
    for number, scenario in enumerate(generate(BOOTS["plain"], count=MOST, seed=seed), 1):
        outcome = engines(scenario, engine=release, revert=revert, fresh=True)
        if set(case.kinds) & set(outcome.verdict.root_kinds):
            return number
    return MOST + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", help="releases to try, with +revert where it applies")
    parser.add_argument("--out", type=Path, default=Path("runs/time-to-detect"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.only.split(",") if options.only else None
    engines = LiveEngines(
        environment=lambda version: envs.ensure(version, lambda text: print(text, file=sys.stderr)),
        default=envs.NEWEST,
        device="cpu",
        logs=options.out / "logs",
    )
    results: list[dict[str, Any]] = []
    try:
        for name, release, revert in BUGS:
            label = f"{release}+{revert}" if revert else release
            if wanted is not None and label not in wanted:
                continue
            case = catalogue.load(name)
            needed = [scenarios_needed(engines, case, release, revert, seed) for seed in range(options.seeds)]
            results.append({"case": name, "engine": label, "needed": needed, "median": statistics.median(needed)})
            print(f"{name} on {label}: median {statistics.median(needed):g}, worst {max(needed)}, {needed}", flush=True)
            (options.out / "time_to_detect.json").write_text(json.dumps(results, indent=1))
    finally:
        engines.close()
        print(machine())
    return 1 if any(result["median"] > PROMISE for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
