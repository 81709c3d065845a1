"""The pairs of `make_real_size` on one card: generated scenarios, defects put back, mutants, a long prompt.

    python -m benchmarks.real_size run --pair DIR/llama-1b --dtype float16 --out FOLDER [--only NAME,...] [--at-once 4]
        [--examples 100] [--seconds 120] [--engine 0.5.13] [--long 8000]
    python -m benchmarks.real_size table FOLDER ...

`run` loads one reference on the card and judges by it what several engines do side by side, one a job: `eager` (with
mutants behind the generated scenarios) and `graphs`; in float16 also `pr25015` and `pr26329`, put back by the revert
switch; in bfloat16 also `long`, a prompt in chunks of 2,048. FOLDER gets a JSON file a job: verdicts, seconds, memory,
ties, and for every kind of rows how the engine's errors lie to those of the reference's second run. A file that is
there already is not made again. `table` prints a line a file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cases import catalogue
from cases.boots import BOOTS, EAGLE3_BOOTS, Boot
from cases.fixed import tokens
from cases.generation import generate
from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS
from harness.contract.align import align
from harness.contract.measured import logit_noise, state_noise, usual_ties
from harness.contract.noise import judge_states
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Op, Scenario
from harness.contract.tolerance import budget_for
from harness.contract.trace import Trace
from harness.driving.adapt import Wanted, adapted
from harness.driving.checkpoint_files import read_checkpoint
from harness.driving.footprint import WORKSPACE_MIB, footprint
from harness.driving.judging import judge_with
from harness.driving.oracle import Oracle
from harness.driving.place import Place
from harness.driving.pool import EnginePool, unwatched
from harness.driving.progress import ScenarioResult, Setup
from harness.engines import envs
from harness.engines.errors import EngineError
from harness.engines.launch import build_launch
from harness.engines.process import Launch
from harness.search.executed import accepted
from harness.search.mutants import with_mutant

#: Mutants of states that act on eager engines.
MUTATED = ("hidden-neighbour", "hidden-neighbour-extend", "hidden-previous-round", "hidden-shifted-extend")
#: SGLang compares what is free after loading with what was before; other engines that load take from it meanwhile.
ROOM = {"mem_fraction_static": 0.9}
REVERTED = {"pr25015": 25015, "pr26329": 26329}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one engine is driven through."""

    name: str
    graphs: bool
    scenarios: tuple[Scenario, ...]
    revert: int | None = None


def boot_of(pair: Path) -> Boot:
    """The boot configuration of the pair's algorithm."""
    found = json.loads((pair / "draft" / "config.json").read_text())["architectures"]
    return EAGLE3_BOOTS["eagle3"] if found == ["LlamaForCausalLMEagle3"] else BOOTS["plain"]


def jobs_of(asked: argparse.Namespace) -> list[Job]:
    """All jobs of a pair in one dtype, or those that are named."""
    boot = boot_of(asked.pair)
    own = {"checkpoint": boot.checkpoint, "spec": boot.spec}
    generated = generate(boot, count=asked.examples, seed=asked.seed)
    exercise = EXERCISES["chain"][0].model_copy(update=own)
    found = {
        "eager": [*(with_mutant(exercise, MUTANTS[name]) for name in MUTATED), *generated],
        "graphs": generated,
    }
    if asked.dtype == "bfloat16":
        found["long"] = [long_prompt(boot, asked.long)]
    else:
        found |= {name: [catalogue.load(name).scenario.model_copy(update=own)] for name in REVERTED}
    jobs = []
    for name, scenarios in found.items():
        scenarios = [one.model_copy(update={"engine": one.engine.model_copy(update=ROOM)}) for one in scenarios]
        wanted = Wanted(dtype=asked.dtype, cuda_graph=name != "eager" and asked.device == "cuda")
        ready = tuple(adapted(scenarios, wanted, device=asked.device))
        jobs.append(Job(name=name, graphs=name != "eager", scenarios=ready, revert=REVERTED.get(name)))
    return [job for job in jobs if not asked.only or job.name in asked.only.split(",")]


def long_prompt(boot: Boot, length: int) -> Scenario:
    """One request, its prompt in chunks of 2,048."""
    more = {"chunked_prefill_size": 2048, "max_total_tokens": 2 * length, "context_length": length + 512}
    return Scenario(
        name="long",
        checkpoint=boot.checkpoint,
        spec=boot.spec,
        engine=boot.engine.model_copy(update=more),
        requests=(RequestSpec(rid="long", input_ids=tokens(seed=3, length=length), max_new_tokens=24),),
        script=(Op(kind="submit", rids=("long",)), Op(kind="drain")),
    )


def launch_of(asked: argparse.Namespace, job: Job, scenario: Scenario) -> Launch:
    return build_launch(
        env=envs.ensure(asked.engine, print),
        spec=scenario.spec,
        engine=scenario.engine,
        target=asked.pair / "target",
        draft=asked.pair / "draft",
        device=asked.device,
        revert=job.revert,
    )


def quantiles(values: np.ndarray) -> dict[str, float]:
    some = values[np.isfinite(values)]
    if not len(some):
        return {}
    at = (0.01, 0.5, 0.99, 0.999, 1.0)
    return {"n": len(some)} | {f"q{share:g}": float(np.quantile(some, share)) for share in at}


class Calibration:
    """Errors of passing scenarios by kind of row: the engine's size over its limit, and over the second run's."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, list[np.ndarray]]] = {}
        self.usual = 0.0

    def _add(self, name: str, **values: np.ndarray) -> None:
        for key, value in values.items():
            self.rows.setdefault(name, {}).setdefault(key, []).append(value)

    def see(self, engine: Trace, reference: Trace) -> None:
        budget = budget_for(str(engine.header["dtype"]))
        pairs = align(engine.rows, reference.rows)
        phases = engine.rows.strings["phase"][pairs.engine].astype(str)
        for name, truth in reference.tensors.items():
            noise = state_noise(reference, name, budget)
            if noise is None or name not in engine.tensors:
                continue
            side, phase = name.split(".")
            chosen = phases == phase
            mine = engine.rows.ints[side][pairs.engine[chosen]]
            theirs = reference.rows.ints[side][pairs.reference[chosen]]
            both = (mine >= 0) & (theirs >= 0)
            ours, right = engine.tensors[name][mine[both]], truth[theirs[both]]
            own = reference.tensors[f"own.{name}"][theirs[both]]
            if not len(ours):
                continue
            judged = judge_states(engine=ours, truth=right, own=own, noise=noise)
            rms = [np.sqrt(np.square(one - right, dtype=np.float64).mean(axis=1)) for one in (ours, own)]
            size = np.sqrt(np.square(right, dtype=np.float64).mean(axis=1))
            peaks = [np.abs(one - right).max(axis=1) for one in (ours, own)]
            self._add(
                name,
                of_limit=judged.greatest_abs / judged.limit,
                engine_over_own=rms[0] / np.maximum(rms[1], 1e-30),
                own_share=rms[1] / np.maximum(size, 1e-30),
                greatest_over_own=peaks[0] / np.maximum(peaks[1], 1e-30),
                sensitivity=np.asarray([noise.sensitivity]),
                typical=np.asarray([noise.typical]),
                peak=np.asarray([noise.peak]),
            )
        self._logits(engine, reference, pairs.engine, pairs.reference, phases)

    def _logits(
        self, engine: Trace, reference: Trace, mine: np.ndarray, theirs: np.ndarray, phases: np.ndarray
    ) -> None:
        noise = logit_noise(reference, budget_for(str(engine.header["dtype"])))
        self.usual += usual_ties(reference, noise, theirs) or 0.0
        found: dict[str, list[tuple[float, float, float, float]]] = {}
        for one, other, phase in zip(mine.tolist(), theirs.tolist(), phases.tolist(), strict=True):
            truth, ours = _best(reference, other), _best(engine, one)
            shared = [abs(ours[token] - truth[token]) for token in ours.keys() & truth.keys()]
            if shared and "own.logits" in reference.tensors:
                best = sorted(truth.values(), reverse=True)
                own = float(reference.tensors["own.logits"][other, 0])
                found.setdefault(phase, []).append((max(shared), own, float(noise.limit[other]), best[0] - best[1]))
        for phase, rows in found.items():
            error, own, limit, margin = np.asarray(rows).T
            self._add(
                f"logits.{phase}",
                of_limit=error / limit,
                engine_over_own=error / np.maximum(own, 1e-30),
                own=own,
                margin=margin,
            )

    def summary(self) -> dict[str, Any]:
        return {
            name: {key: quantiles(np.concatenate(value)) for key, value in kinds.items()}
            for name, kinds in self.rows.items()
        }


def _best(trace: Trace, row: int) -> dict[int, float]:
    """The best tokens of a row, and their logits."""
    lists = trace.rows.lists
    return dict(zip(lists["top_ids"][row].tolist(), lists["top_logits"][row].tolist(), strict=True))


def memory_used() -> int:
    """MiB used on the card, all processes together; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return (total - free) // 2**20


def driven(
    asked: argparse.Namespace,
    job: Job,
    pool: EnginePool,
    judged: Callable[[Scenario, Trace, float], Future[ScenarioResult]],
) -> Iterator[ScenarioResult]:
    """Each judged while the engine is at the next, until the seconds are over."""
    pool.use(launch_of(asked, job, job.scenarios[0]))
    print(f"{job.name}: booted after {time.monotonic() - asked.start:.0f} s", flush=True)
    end, waiting = time.monotonic() + asked.seconds, list[Future[ScenarioResult]]()
    for scenario in job.scenarios:
        if time.monotonic() > end:
            break
        start = time.monotonic()
        trace = pool.drive(launch_of(asked, job, scenario), scenario, on_step=unwatched)
        waiting.append(judged(scenario, trace, time.monotonic() - start))
        if len(waiting) > 1:
            yield waiting.pop(0).result()
    yield from (future.result() for future in waiting)


def work(asked: argparse.Namespace, job: Job, oracle: Oracle, judge: ThreadPoolExecutor, said: int) -> None:
    """One job, from its boot to its file."""
    import torch

    out = asked.out / f"{asked.pair.name}-{asked.dtype}-{job.name}-{asked.engine}.json"
    if out.exists():
        return print(f"{out}: there already")
    setup = Setup(release=asked.engine, device=asked.device, revert=job.revert, cpu_attention="torch", assumed=())
    pool = EnginePool(logs=asked.out / f"{out.stem}-logs", log_name="engine.log", lease=None)
    seen, spent, lines = Calibration(), Counter[str](), list[dict[str, Any]]()
    accept, why, begun = list[float](), "", time.monotonic()

    def judged(scenario: Scenario, trace: Trace, seconds: float) -> Future[ScenarioResult]:
        return judge.submit(partial(judge_with, oracle, scenario, trace, setup=setup, engine_seconds=seconds))

    try:
        for result in driven(asked, job, pool, judged):
            spent.update(result.seconds)
            lines.append(_line(result))
            if result.verdict.outcome == "PASS" and result.reference is not None:
                seen.see(result.trace, result.reference)
                committed, verifies = accepted(result)
                accept.append(committed / max(verifies, 1))
            elif not job.revert and not any(op.kind == "mutant" for op in result.scenario.script):
                print(job.name, lines[-1], *result.divergences[:3], sep="\n    ", flush=True)
    except EngineError as error:
        why = str(error)
        print(f"{job.name}: {why}", flush=True)
    finally:
        used = memory_used()
        pool.end()
    document = {
        "pair": asked.pair.name,
        "engine": asked.engine,
        "dtype": asked.dtype,
        "job": job.name,
        "error": why,
        "scenarios": lines,
        "seconds": dict(spent) | {"job": time.monotonic() - begun},
        "boots": pool.boots,
        "usual_ties": seen.usual,
        "accept_length": float(np.mean(accept)) if accept else None,
        "card_mib": used,
        "reference_mib": torch.cuda.max_memory_allocated() // 2**20 if torch.cuda.is_available() else None,
        "said_mib": said,
        "errors": seen.summary(),
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


def run(asked: argparse.Namespace) -> int:
    asked.start = time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(asked)
    files = [read_checkpoint("--pair", asked.pair / name) for name in ("target", "draft")]
    need = footprint(files[0], files[1], [one for job in jobs for one in job.scenarios], held=asked.dtype)
    print(f"{asked.pair.name} in {asked.dtype}: the reference on {asked.reference_device} takes {need}", flush=True)
    place = Place(device=asked.reference_device, held=asked.dtype)
    oracle = Oracle(target=asked.pair / "target", draft=asked.pair / "draft", place=place).load(held=asked.dtype)
    print(f"loaded after {time.monotonic() - asked.start:.0f} s", flush=True)
    with ThreadPoolExecutor(max_workers=1) as judge, ThreadPoolExecutor(max_workers=asked.at_once) as engines:
        doing = [engines.submit(work, asked, job, oracle, judge, need.mib + WORKSPACE_MIB) for job in jobs]
        for future in doing:
            future.result()
    return table([asked.out])


def _line(result: ScenarioResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "name": result.scenario.name,
        "outcome": str(verdict.outcome),
        "reasons": [text[:300] for text in verdict.reasons[:4]],
        "ties": verdict.ties,
        "compared": dict(verdict.compared),
        "root_kinds": list(verdict.root_kinds),
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
    }


#: Columns of the table: heading, width.
COLUMNS = (
    ("pair", 9),
    ("release", 8),
    ("dtype", 9),
    ("job", 8),
    ("PASS", 5),
    ("FAIL", 5),
    ("UNKNOWN", 8),
    ("ties", 5),
    ("usual", 6),
    ("rows", 7),
    ("engine s", 9),
    ("ref s", 6),
    ("checks s", 9),
    ("said MiB", 9),
    ("had", 6),
    ("of limit", 9),
    ("engine/own", 11),
    ("accepted", 8),
)


def table(places: list[Path]) -> int:
    """A line a file. of limit: the row nearest to it; engine/own: typical sizes of errors, least and most of a kind."""
    files = [file for place in places for file in (sorted(place.glob("*.json")) if place.is_dir() else [place])]
    print("".join(f"{name:<{width}}" for name, width in COLUMNS))
    for file in files:
        one = json.loads(file.read_text())
        print("".join(f"{value:<{width}}" for value, (_, width) in zip(_cells(one), COLUMNS, strict=True)))
    for one in (json.loads(file.read_text()) for file in files):
        if one["error"]:
            print(f"{one['pair']} {one['dtype']} {one['job']}: {one['error'][:500]}")
        for line in one["scenarios"]:
            if _mutated(line) or one["job"] in REVERTED:
                print(f"{one['pair']} {one['dtype']} {line['name']}: {line['outcome']} {' '.join(line['root_kinds'])}")
    return 0


def _mutated(line: dict[str, Any]) -> bool:
    return any(line["name"].endswith(name) for name in MUTATED)


def _cells(one: dict[str, Any]) -> list[str]:
    sound, seconds = [line for line in one["scenarios"] if not _mutated(line)], one["seconds"]
    outcomes = Counter(line["outcome"] for line in sound)
    rows = sum(line["compared"].get("hidden_rows", 0) for line in sound)
    worst = max((kind["of_limit"].get("q1", 0.0) for kind in one["errors"].values()), default=float("nan"))
    typical = [kind["engine_over_own"].get("q0.5", 0.0) for kind in one["errors"].values()]
    return [
        one["pair"],
        one["engine"],
        one["dtype"],
        one["job"],
        *(str(outcomes[name]) for name in ("PASS", "FAIL", "UNKNOWN")),
        str(sum(line["ties"] for line in sound)),
        f"{one['usual_ties']:.1f}",
        str(rows),
        *(f"{seconds.get(name, 0.0):.1f}" for name in ("engine", "reference", "judge")),
        str(one["said_mib"]),
        str(one["reference_mib"]),
        f"{worst:.2f}",
        f"{min(typical, default=0):.2f}-{max(typical, default=0):.2f}",
        f"{one['accept_length'] or 0:.2f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("run")
    one.add_argument("--pair", type=Path, required=True)
    one.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    one.add_argument("--device", default="cuda")
    one.add_argument("--reference-device", default="cuda")
    one.add_argument("--only", default="")
    one.add_argument("--at-once", type=int, default=4)
    one.add_argument("--examples", type=int, default=100)
    one.add_argument("--seed", type=int, default=17)
    one.add_argument("--seconds", type=float, default=300.0)
    one.add_argument("--engine", default="0.5.13")
    one.add_argument("--long", type=int, default=8000)
    one.add_argument("--out", type=Path, required=True)
    shown = commands.add_parser("table")
    shown.add_argument("places", type=Path, nargs="+")
    asked = parser.parse_args()
    return run(asked) if asked.command == "run" else table(asked.places)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    raise SystemExit(main())
