"""What one GPU shows: corpus verdicts, generated scenarios, what the probe costs, and how workers share a card.

    python -m benchmarks.gpu --out FOLDER [--parts corpus,generated,cost,workers,mutants] [--jobs 12] [--scenarios 500]

Every job is a process of its own with its own engine and its own deadline, several side by side, since boots are what
costs. Run folders and one JSON document a job go below --out; a short table comes last. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_combinations import COMBINATIONS
from harness.engines import envs

#: Releases built for the torch that GPU machines without a network have, oldest first; the main one of the evidence.
RELEASES, MAIN = ("0.5.11", "0.5.12.post1", "0.5.13", "0.5.17"), "0.5.13"
MODES = {"eager": "--no-graphs", "graphs": "--graphs"}
CASES = ("pr25015", "pr26329")
REVERTS = {"pr25015": "25015", "pr26329": "26329"}
FIRST_REVERT = "0.5.13"
#: `eaglecheck` with time for a first prefill that compiles kernels of flashinfer.
PATIENT = "from harness.cli.main import app; from harness.engines import side; side.STEP_SECONDS = 500.0; app()"
#: Mutants that change floats only, or positions and masks that only floats show on a GPU.
FLOAT_MUTANTS = (
    "hidden-neighbour,hidden-neighbour-extend,hidden-previous-round,hidden-zeroed,hidden-zeroed-prompt,"
    "hidden-shifted-extend,hidden-dtype,proposal-second-best,proposal-swapped,mask-bit-lost,mask-bit-extra,"
    "mask-bit-lost-chain,slot-of-neighbour,draft-position-late"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command and the document it writes."""

    name: str
    argv: tuple[str, ...]
    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a job ended: exit code (124: its deadline), wall seconds, its document or None, its last lines."""

    name: str
    code: int
    seconds: float
    document: Any
    tail: str


def corpus(out: Path) -> Iterator[Job]:
    """Every case on every release in both modes, and reverted where SGLang can."""
    for release in RELEASES:
        if not envs.state(release).ready:
            continue
        for mode, option in MODES.items():
            for case in CASES:
                yield _matrix(out, release, mode, option, case, ())
                if release >= FIRST_REVERT:
                    yield _matrix(out, release, mode, option, case, ("--revert", REVERTS[case]))


def _matrix(out: Path, release: str, mode: str, option: str, case: str, revert: tuple[str, ...]) -> Job:
    name = f"{case}-{release}-{mode}" + ("-reverted" if revert else "")
    argv = ("-m", "harness.cli", "matrix", "--engines", release, "--cases", case, "--device", "cuda", option, *revert)
    return Job(name=name, argv=(*argv, "--runs", str(out / "runs" / name), "--json", _json(out, name)), seconds=240)


def generated(out: Path, scenarios: int, seconds: int, share: str) -> Iterator[Job]:
    """Generated scenarios on the main release, a share for each combination."""
    names = [name for name, one in COMBINATIONS.items() if one.backend == "triton" and not one.page]
    each = -(-scenarios // len(names))
    for number, name in enumerate(names):
        argv = ("-m", "benchmarks.gpu_jobs", "generated", name, "--count", str(each), "--seed", str(number))
        argv += ("--limit", str(seconds - 10), *(("--share", share) if share else ()))
        yield Job(
            name=f"generated-{name}",
            argv=(*argv, "--engine", MAIN, "--out", str(out), "--json", _json(out, f"generated-{name}")),
            seconds=seconds,
        )


#: Job -> levels, repeats and engines of a level: longer rounds need fewer.
COSTS = {
    "graphs": ("off,full,resting", 40, 3),
    "eager": ("off,full", 4, 1),
    "large-graphs": ("off,full", 6, 1),
    "deep-graphs": ("off,full", 6, 1),
    "large-eager": ("off,full", 2, 1),
}


def cost(out: Path) -> Iterator[Job]:
    for mode, (levels, repeats, each) in COSTS.items():
        name = f"cost-{mode}"
        argv = ("-m", "benchmarks.gpu_jobs", "cost", mode, "--engine", MAIN, "--out", str(out), "--levels", levels)
        argv += (
            "--repeats",
            str(repeats),
            "--each",
            str(each),
            "--together",
            str(len(COSTS)),
            "--json",
            _json(out, name),
        )
        yield Job(name=name, argv=argv, seconds=330)


def fa3(out: Path, seconds: int, share: str) -> Iterator[Job]:
    """SGLang #27360: trees over pages of several tokens on fa3, in a graph; fixed, and with the fix taken out."""
    for name, revert in (
        ("plain-graphs-fa3", ()),
        ("tree-pages-graphs-triton", ()),
        ("tree-pages-graphs-fa3", ()),
        ("tree-pages-graphs-fa3", ("--revert", "27360")),
        ("deeper-tree-pages-graphs-fa3", ()),
        ("deeper-tree-pages-graphs-fa3", ("--revert", "27360")),
    ):
        whole = f"generated-{name}" + ("-reverted" if revert else "")
        argv = ("-m", "benchmarks.gpu_jobs", "generated", name, "--count", "25", "--seed", "27360", *revert)
        argv += ("--limit", str(seconds - 10), *(("--share", share) if share else ()))
        argv += ("--engine", MAIN, "--out", str(out))
        yield Job(name=whole, argv=(*argv, "--json", _json(out, whole)), seconds=seconds)


def workers(out: Path) -> Iterator[Job]:
    argv = ("-m", "benchmarks.gpu_jobs", "workers", "card", "--count", "12", "--engine", MAIN, "--out", str(out))
    yield Job(name="workers", argv=(*argv, "--json", _json(out, "workers")), seconds=240)


def tree_index(out: Path) -> Iterator[Job]:
    """SGLang #27338: the index buffer of wide trees on flashinfer, in a graph; fixed, and before the fix.

    The revert switch cannot be used: the text it looks for is not in 0.5.13.
    """
    file = "cases/scenarios/gpu-topk8-flashinfer.json"
    for release in (MAIN, "0.5.12.post1"):
        name = f"pr27338-{release}"
        argv = ("-c", PATIENT, "run", "--engine", release, "--device", "cuda", "--scenario-file", file)
        argv = (*argv, "--assume", "F-003", "--gpu-share", "4", "--runs", str(out / "runs" / name))
        yield Job(name=name, argv=(*argv, "--json", _json(out, name)), seconds=530)


def mutants(out: Path, only: str) -> Iterator[Job]:
    for mode in MODES:
        name = f"mutants-{mode}"
        argv = ("-m", "benchmarks.gpu_jobs", "mutants", mode, "--engine", MAIN, "--only", only, "--out", str(out))
        yield Job(name=name, argv=(*argv, "--json", _json(out, name)), seconds=300)


def _json(out: Path, name: str) -> str:
    return str(out / "json" / f"{name}.json")


def perform(job: Job, out: Path) -> Done:
    """Run one job to its end or its deadline."""
    start = time.monotonic()
    log = out / "logs" / f"{job.name}.log"
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [sys.executable, *job.argv], stdout=output, stderr=subprocess.STDOUT, timeout=job.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    file = Path(_json(out, job.name))
    document = json.loads(file.read_text()) if file.is_file() else None
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    done = Done(name=job.name, code=code, seconds=time.monotonic() - start, document=document, tail=tail)
    print(f"{done.seconds:6.0f} s  exit {code:3}  {job.name}", flush=True)
    return done


def perform_all(jobs: Sequence[Job], out: Path, *, at_once: int) -> list[Done]:
    for folder in ("logs", "json", "runs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return list(pool.map(lambda job: perform(job, out), jobs))


def card() -> str:
    """Name and driver of the card, as nvidia-smi says."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi says nothing ({error})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="corpus,generated,cost")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--scenarios", type=int, default=500)
    parser.add_argument("--seconds", type=int, default=240, help="deadline of one share of generated scenarios")
    parser.add_argument(
        "--only", default="", help="only jobs whose name contains one of these, comma-separated; $ is its end"
    )
    parser.add_argument("--share", default="", help="GiB that each engine of these two leases; no lease by default")
    parser.add_argument("--mutants", default=FLOAT_MUTANTS, help="which mutants, comma-separated")
    options = parser.parse_args()
    parts = {
        "corpus": lambda: corpus(options.out),
        "generated": lambda: generated(options.out, options.scenarios, options.seconds, options.share),
        "cost": lambda: cost(options.out),
        "workers": lambda: workers(options.out),
        "fa3": lambda: fa3(options.out, options.seconds, options.share),
        "index": lambda: tree_index(options.out),
        "mutants": lambda: mutants(options.out, options.mutants),
    }
    jobs = [job for part in options.parts.split(",") for job in parts[part]()]
    wanted = [word for word in options.only.split(",") if word]
    jobs = [job for job in jobs if not wanted or any(word in f"{job.name}$" for word in wanted)]
    start = time.monotonic()
    print(card(), flush=True)
    done = perform_all(jobs, options.out, at_once=options.jobs)
    wall = time.monotonic() - start
    from benchmarks.gpu_table import table

    text = table(done, wall=wall, card=card(), at_once=options.jobs)
    (options.out / "table.txt").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
