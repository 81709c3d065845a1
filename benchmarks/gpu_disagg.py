"""Disaggregation on one GPU: prefill and decode engine side by side on the card, the fixed scenarios of the family.

    python -m benchmarks.gpu_disagg --out FOLDER [--engine 0.5.13] [--device cuda] [--seconds 190]

Each job boots a pair of engines of its own, all jobs at once. Run folders and one JSON document a job go below --out; a
short table comes last. With --device cpu it is a rehearsal: one job, a few scenarios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import Done, Job, card, perform_all
from cases.fixed_handoff import handoffs

#: Job -> options of `eaglecheck run`; on a GPU, SGLang overlaps scheduling and forwards unless told otherwise.
MODES: dict[str, tuple[str, ...]] = {
    "eager": ("--no-graphs",),
    "graphs": ("--graphs",),
    "eager-normal-loop": ("--no-graphs", "--no-overlap"),
    "graphs-bf16": ("--graphs", "--dtype", "bfloat16"),
}
REHEARSED = ("together", "ends-at-once")


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """One a mode; the scenarios whose pair has a stand-in with heads as wide as GPU kernels want."""
    rehearsal = options.device == "cpu"
    names = REHEARSED if rehearsal else tuple(one.name for one in handoffs())
    for mode, extra in {"cpu": ()}.items() if rehearsal else MODES.items():
        argv = ["-m", "harness.cli", "run", "--engine", options.engine, "--device", options.device]
        argv += ["--family", "disagg", *extra, "--runs", str(options.out / "runs" / mode)]
        argv += [word for name in names for word in ("--scenario", name)]
        document = str(options.out / "json" / f"{mode}.json")
        yield Job(name=mode, argv=(*argv, "--json", document), seconds=options.seconds)


def table(done: list[Done], *, wall: float, card: str) -> str:
    """What each job said, scenario by scenario, and what fails."""
    names = list(dict.fromkeys(one["name"] for job in done for one in _scenarios(job)))
    width = max([len(name) for name in names], default=8)
    lines = [f"{card}   {wall:.0f} s", " " * (width + 2) + "  ".join(f"{job.name:>18}" for job in done)]
    for name in names:
        cells = [_outcome(job, name) for job in done]
        lines.append(f"{name:<{width}}  " + "  ".join(f"{cell:>18}" for cell in cells))
    for job in done:
        failing = sorted({f"{one['name']}: {'; '.join(one['reasons'][:2])}" for one in _failing(job)})
        lines.append(f"{job.name}: exit {job.code}, {job.seconds:.0f} s" + "".join(f"\n    {one}" for one in failing))
        if job.document is None:
            lines.append("    no document; its log ends:\n    " + job.tail.replace("\n", "\n    "))
    return "\n".join(lines) + "\n"


def _scenarios(job: Done) -> list[dict[str, Any]]:
    return list((job.document or {}).get("scenarios", []))


def _outcome(job: Done, name: str) -> str:
    return next((str(one["verdict"]) for one in _scenarios(job) if one["name"] == name), "-")


def _failing(job: Done) -> list[dict[str, Any]]:
    return [one for one in _scenarios(job) if one["verdict"] != "PASS"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", default="0.5.13")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=int, default=190, help="deadline of one job")
    options = parser.parse_args()
    start = time.monotonic()
    where = card() if options.device == "cuda" else "CPU, a rehearsal"
    done = perform_all(list(jobs(options)), options.out, at_once=len(MODES))
    text = table(done, wall=time.monotonic() - start, card=where)
    (options.out / "table.txt").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
