"""DP attention on two real GPUs: the scenarios of the dp family inside CUDA graphs, and what an idle rank does eagerly.

    python -m benchmarks.gpu_dp --out FOLDER [--seconds 245] [--jobs 8] [--releases 0.5.13,0.5.17] [--only graphs]

Every job is one `eaglecheck run` with an engine of its own, several side by side, since boots are what costs: a rank
a card, so every engine uses both. All end within --seconds; a job that could not start by then is named, not hidden.
`--device cpu` rehearses it without cards. A short table comes last, and lies in FOLDER/table.txt beside the documents.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import Done, Job, card, perform
from cases.families import FAMILIES
from harness.engines import envs

#: The main one first: it has to be through if the time is short.
RELEASES = ("0.5.13", "0.5.17", "0.5.12.post1", "0.5.11")
#: What an eager run shows: a rank without requests, and ranks of different sizes. One crash does not end the run.
EAGER = ("other-rank-idle", "uneven-batches", "first-rank-idle")
#: Seconds that a job needs for its boot at least; none is started later.
LEAST = 45.0


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """The family in graphs by checkpoint, and the eager scenarios; for each release that is here."""
    names = [scenario.name for scenario in FAMILIES["dp"].scenarios]
    parts = {
        "eager": list(EAGER),
        "graphs": [name for name in names if not name.startswith("wide-")],
        "graphs-wide": [name for name in names if name.startswith("wide-")],
    }
    for part, wanted in sorted(parts.items(), key=lambda item: item[0] == "graphs-wide"):
        for release in options.releases.split(","):
            if envs.state(release).ready:
                yield _job(options, release, part, wanted)


def _job(options: argparse.Namespace, release: str, part: str, scenarios: list[str]) -> Job:
    name = f"dp-{release}-{part}"
    argv = ["-m", "harness.cli", "run", "--engine", release, "--family", "dp"]
    for scenario in scenarios:
        argv += ["--scenario", scenario]
    if options.device == "cuda":
        graphs = "--graphs" if part.startswith("graphs") else "--no-graphs"
        argv += ["--device", "cuda", graphs, "--gpu-share", str(options.share)]
    argv += ["--runs", str(options.out / "runs" / name), "--json", str(options.out / "json" / f"{name}.json")]
    return Job(name=name, argv=tuple(argv), seconds=int(options.seconds))


def timed(job: Job, out: Path, *, end: float) -> Done:
    """One job within what is left of the time; exit 125 where that is too short to start it."""
    left = end - time.monotonic()
    if left < LEAST:
        return Done(name=job.name, code=125, seconds=0.0, document=None, tail="not started: the time was over")
    return perform(replace(job, seconds=int(left)), out)


def table(done: list[Done], *, wall: float, cards: str) -> str:
    """Verdict by job and scenario, and the signature of each finding."""
    lines = [f"{cards}", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {len(done)} jobs, {wall:.0f} s"]
    for one in done:
        if one.document is None:
            lines += [f"{one.name:28} no document, exit {one.code}, {one.seconds:.0f} s"]
            lines += [f"      {line[:150]}" for line in one.tail.splitlines()[-8:]]
            continue
        lines.append(f"{one.name:28} {one.document['verdict']:8} {one.seconds:.0f} s")
        for scenario in one.document["scenarios"]:
            lines.append(f"  {scenario['name']:28} {scenario['verdict']}")
            lines += [f"      {found}" for found in _signatures(one.document, scenario["name"])[:4]]
            lines += [f"      {reason[:150]}" for reason in scenario.get("reasons", [])][:3]
    return "\n".join(lines) + "\n"


def _signatures(document: dict[str, Any], scenario: str) -> list[str]:
    """What the findings of one scenario that follow from no other are called, with the rank and round of the first."""
    roots = [one for one in document["findings"] if one["scenario"] == scenario and not one["consequence_of"]]
    return [f"{one['signature']} (rank {one['first']['dp_rank']}, round {one['first']['round']})" for one in roots]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=245.0, help="everything has ended by then")
    parser.add_argument("--jobs", type=int, default=8, help="engines side by side")
    parser.add_argument("--releases", default=",".join(RELEASES))
    parser.add_argument("--only", default="", help="only jobs whose name contains one of these, comma-separated")
    parser.add_argument("--share", type=float, default=6.0, help="GiB that an engine leases on each card")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    for folder in ("logs", "json", "runs"):
        (options.out / folder).mkdir(parents=True, exist_ok=True)
    wanted = [word for word in options.only.split(",") if word]
    chosen = [job for job in jobs(options) if not wanted or any(word in job.name for word in wanted)]
    start = time.monotonic()
    cards = card() if options.device == "cuda" else "no card: a rehearsal on the CPU"
    print(cards, flush=True)
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        done = list(pool.map(lambda job: timed(job, options.out, end=start + options.seconds), chosen))
    text = table(done, wall=time.monotonic() - start, cards=cards)
    (options.out / "table.txt").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
