"""Disaggregation on one GPU: prefill and decode engine side by side on the card, the fixed scenarios of the family.

    python -m benchmarks.gpu_disagg --out FOLDER [--device cuda] [--seconds 190] [--only NAME,...]

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

#: Job -> release and options of `eaglecheck run`. SGLang overlaps scheduling and forwards unless told otherwise, and
#: up to 0.5.13 hands over no draft state then (docs/findings/F-014.md).
MODES: dict[str, tuple[str, ...]] = {
    "0.5.13-eager-normal": ("--engine", "0.5.13", "--no-graphs", "--no-overlap"),
    "0.5.13-graphs-normal": ("--engine", "0.5.13", "--graphs", "--no-overlap"),
    "0.5.13-eager-overlap": ("--engine", "0.5.13", "--no-graphs"),
    "0.5.17-graphs-overlap": ("--engine", "0.5.17", "--graphs"),
    "0.5.17-eager-bf16": ("--engine", "0.5.17", "--no-graphs", "--dtype", "bfloat16"),
}
REHEARSAL = {"0.5.13-cpu": ("--engine", "0.5.13")}
REHEARSED = ("together", "ends-at-once")


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """One a mode; the scenarios whose pair has a stand-in with heads as wide as GPU kernels want."""
    rehearsal = options.device == "cpu"
    names = REHEARSED if rehearsal else tuple(one.name for one in handoffs())
    wanted = [name for name in options.only.split(",") if name]
    for mode, extra in (REHEARSAL if rehearsal else MODES).items():
        if wanted and mode not in wanted:
            continue
        argv = ["-m", "harness.cli", "run", "--device", options.device]
        argv += ["--family", "disagg", *extra, "--runs", str(options.out / "runs" / mode)]
        argv += [word for name in names for word in ("--scenario", name)]
        document = str(options.out / "json" / f"{mode}.json")
        yield Job(name=mode, argv=(*argv, "--json", document), seconds=options.seconds)


def table(done: list[Done], *, wall: float, card: str) -> str:
    """What each job said, scenario by scenario, and what fails."""
    names = list(dict.fromkeys(one["name"] for job in done for one in _scenarios(job)))
    width = max([len(name) for name in names], default=8)
    lines = [f"{card}   {wall:.0f} s", " " * (width + 2) + "  ".join(f"{job.name:>22}" for job in done)]
    for name in names:
        cells = [_outcome(job, name) for job in done]
        lines.append(f"{name:<{width}}  " + "  ".join(f"{cell:>22}" for cell in cells))
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
    parser.add_argument("--only", default="", help="only these jobs, comma-separated")
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
