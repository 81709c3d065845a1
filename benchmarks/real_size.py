"""The pairs of `make_real_size` on one card: generated scenarios, defects put back, mutants, a long prompt.

    python -m benchmarks.real_size run --pair DIR/llama-1b --dtype float16 [--graphs] [--examples 100] [--engine 0.5.13]
        [--revert 25015] [--mutants a,b] [--long 8000] [--seconds 120] --out FILE.json
    python -m benchmarks.real_size table FILE.json ...

`run` boots one engine, drives it, and judges beside it in this process, with the reference on the same card. FILE.json
holds verdicts, seconds, memory, ties, and for every kind of rows how the engine's errors lie to those that the
reference's second run has; what is there already is not run again. `table` prints a line a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cases.boots import BOOTS, EAGLE3_BOOTS, Boot
from cases.fixed import tokens
from cases.generation import generate
from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS
from harness.contract.align import align
from harness.contract.measured import logit_noise, state_noise, usual_ties
from harness.contract.noise import judge_states
from harness.contract.scenario import Op, RequestSpec, Scenario
from harness.contract.tolerance import budget_for
from harness.contract.trace import Trace
from harness.driving.adapt import Wanted, adapted
from harness.driving.checkpoint_files import read_checkpoint
from harness.driving.footprint import Place, footprint
from harness.driving.judging import JudgeQueue, judge_with
from harness.driving.oracle import Oracle
from harness.driving.pool import EnginePool, unwatched
from harness.driving.progress import ScenarioResult, Setup
from harness.engines import envs
from harness.engines.launch import build_launch
from harness.engines.process import Launch
from harness.search.mutants import with_mutant


def boot_of(pair: Path) -> Boot:
    """The boot configuration of the pair's algorithm."""
    found = json.loads((pair / "draft" / "config.json").read_text())["architectures"]
    return EAGLE3_BOOTS["eagle3"] if found == ["LlamaForCausalLMEagle3"] else BOOTS["plain"]


def scenarios_of(asked: argparse.Namespace, boot: Boot) -> list[Scenario]:
    """What is asked for, in order."""
    found: list[Scenario] = []
    if asked.long:
        request = RequestSpec(rid="long", input_ids=tokens(seed=3, length=asked.long), max_new_tokens=24)
        script = (Op(kind="submit", rids=("long",)), Op(kind="drain"))
        engine = boot.engine.model_copy(update={"chunked_prefill_size": 2048, "max_total_tokens": 16384})
        one = Scenario(
            name="long", checkpoint=boot.checkpoint, spec=boot.spec, engine=engine, requests=(request,), script=script
        )
        return adapted([one], wanted(asked), device=asked.device)
    if asked.mutants:
        exercise = EXERCISES["chain"][0].model_copy(update={"checkpoint": boot.checkpoint, "spec": boot.spec})
        found = [exercise, *(with_mutant(exercise, MUTANTS[name]) for name in asked.mutants.split(","))]
    else:
        found = generate(boot, count=asked.examples, seed=asked.seed)
    return adapted(found, wanted(asked), device=asked.device)


def wanted(asked: argparse.Namespace) -> Wanted:
    return Wanted(dtype=asked.dtype, cuda_graph=bool(asked.graphs))


def launch_of(asked: argparse.Namespace, scenario: Scenario) -> Launch:
    return build_launch(
        env=envs.ensure(asked.engine, print),
        spec=scenario.spec,
        engine=scenario.engine,
        target=asked.pair / "target",
        draft=asked.pair / "draft",
        device=asked.device,
        revert=asked.revert,
        mutants_in_graphs=bool(asked.mutants and asked.graphs),
        **({"context_length": asked.long + 512} if asked.long else {}),
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

    def see(self, scenario: Scenario, engine: Trace, reference: Trace) -> None:
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
            ours, right, own = (
                engine.tensors[name][mine[both]],
                truth[theirs[both]],
                reference.tensors[f"own.{name}"][theirs[both]],
            )
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
            truth = dict(
                zip(
                    reference.rows.lists["top_ids"][other].tolist(),
                    reference.rows.lists["top_logits"][other].tolist(),
                    strict=True,
                )
            )
            ours = dict(
                zip(
                    engine.rows.lists["top_ids"][one].tolist(),
                    engine.rows.lists["top_logits"][one].tolist(),
                    strict=True,
                )
            )
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


def _accept(result: ScenarioResult) -> float:
    """Mean accept length: ACCEPT rows over verify rounds."""
    phases = result.trace.rows.strings["phase"].astype(str)
    rounds = {
        (rid, attempt, committed)
        for rid, attempt, committed, phase in zip(
            result.trace.rows.strings["rid"].tolist(),
            result.trace.rows.ints["attempt"].tolist(),
            result.trace.rows.ints["committed"].tolist(),
            phases.tolist(),
            strict=True,
        )
        if phase == "ACCEPT"
    }
    return float((phases == "ACCEPT").sum()) / max(len(rounds), 1)


def memory_used() -> int:
    """MiB used on the card, all processes together."""
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    return int(said.stdout.split()[0]) if said.stdout.split() else -1


def drive_all(
    asked: argparse.Namespace, scenarios: list[Scenario], oracle: Oracle, pool: EnginePool
) -> Iterator[ScenarioResult]:
    """Each judged while the engine is at the next, until the seconds are over."""
    setup = Setup(release=asked.engine, device=asked.device, revert=asked.revert, cpu_attention="torch", assumed=())
    first = launch_of(asked, scenarios[0])
    pool.use(first)
    print(f"booted after {time.monotonic() - asked.start:.0f} s", flush=True)
    end = time.monotonic() + asked.seconds
    with JudgeQueue() as queue:
        for scenario in scenarios:
            if time.monotonic() > end:
                break
            start = time.monotonic()
            trace = pool.drive(launch_of(asked, scenario), scenario, on_step=unwatched)
            spent = time.monotonic() - start
            queue.put(partial(judge_with, oracle, scenario, trace, setup=setup, engine_seconds=spent))
            yield from queue.take(leave=1)
        yield from queue.take()


def run(asked: argparse.Namespace) -> int:
    if asked.out.exists():
        print(f"{asked.out}: there already")
        return 0
    import torch

    asked.start = time.monotonic()
    boot = boot_of(asked.pair)
    scenarios = scenarios_of(asked, boot)
    files = [read_checkpoint("--pair", asked.pair / name) for name in ("target", "draft")]
    need = footprint(files[0], files[1], scenarios, held=asked.dtype)
    print(f"the reference on {asked.reference_device} takes {need}", flush=True)
    place = Place(device=asked.reference_device, held=asked.dtype)
    oracle = Oracle(target=asked.pair / "target", draft=asked.pair / "draft", place=place)
    oracle.load(held=asked.dtype)
    print(f"reference loaded after {time.monotonic() - asked.start:.0f} s", flush=True)
    logs = asked.out.parent / f"{asked.out.stem}-logs"
    pool = EnginePool(logs=logs, log_name="engine.log", lease=None)
    seen, spent, lines = Calibration(), Counter[str](), list[dict[str, Any]]()
    accept: list[float] = []
    try:
        for result in drive_all(asked, scenarios, oracle, pool):
            spent.update(result.seconds)
            lines.append(_line(result))
            if result.verdict.outcome == "PASS" and result.reference is not None:
                seen.see(result.scenario, result.trace, result.reference)
                accept.append(_accept(result))
            if result.verdict.outcome != "PASS":
                print(lines[-1], flush=True)
                for one in result.divergences[:3]:
                    print("   ", one, flush=True)
    finally:
        boots = pool.boots
        used = memory_used()
        pool.end()
    document = {
        "pair": asked.pair.name,
        "engine": asked.engine,
        "dtype": asked.dtype,
        "graphs": bool(asked.graphs),
        "revert": asked.revert,
        "mutants": asked.mutants,
        "long": asked.long,
        "scenarios": lines,
        "seconds": dict(spent) | {"total": time.monotonic() - asked.start},
        "boots": boots,
        "usual_ties": seen.usual,
        "accept_length": float(np.mean(accept)) if accept else None,
        "card_mib": used,
        "reference_mib": torch.cuda.max_memory_allocated() // 2**20 if torch.cuda.is_available() else None,
        "said_mib": need.mib,
        "errors": seen.summary(),
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(document, indent=1) + "\n")
    table([asked.out])
    return 0


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
    ("decode", 7),
    ("what", 13),
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
)


def table(files: list[Path]) -> int:
    """A line a file. of limit: the row nearest to it; engine/own: typical sizes of errors, least and most of a kind."""
    print("".join(f"{name:<{width}}" for name, width in COLUMNS))
    for file in files:
        one = json.loads(file.read_text())
        print("".join(f"{value:<{width}}" for value, (_, width) in zip(_cells(one), COLUMNS, strict=True)))
        if one["mutants"]:
            for line in one["scenarios"]:
                print(f"    {line['name']}: {line['outcome']} {' '.join(line['root_kinds'])}")
    return 0


def _cells(one: dict[str, Any]) -> list[str]:
    outcomes, seconds = Counter(line["outcome"] for line in one["scenarios"]), one["seconds"]
    what = "mutants" if one["mutants"] else f"long {one['long']}" if one["long"] else "generated"
    what = f"revert {one['revert']}" if one["revert"] else what
    rows = sum(line["compared"].get("hidden_rows", 0) for line in one["scenarios"])
    worst = max((kind["of_limit"].get("q1", 0.0) for kind in one["errors"].values()), default=float("nan"))
    typical = [kind["engine_over_own"].get("q0.5", 0.0) for kind in one["errors"].values()]
    return [
        one["pair"],
        one["engine"],
        one["dtype"],
        "graphs" if one["graphs"] else "eager",
        what,
        *(str(outcomes[name]) for name in ("PASS", "FAIL", "UNKNOWN")),
        str(sum(line["ties"] for line in one["scenarios"])),
        f"{one['usual_ties']:.1f}",
        str(rows),
        *(f"{seconds.get(name, 0.0):.1f}" for name in ("engine", "reference", "judge")),
        str(one["said_mib"]),
        str(one["reference_mib"]),
        f"{worst:.2f}",
        f"{min(typical, default=0):.2f}-{max(typical, default=0):.2f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("run")
    one.add_argument("--pair", type=Path, required=True)
    one.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    one.add_argument("--device", default="cuda")
    one.add_argument("--graphs", action="store_true")
    one.add_argument("--examples", type=int, default=100)
    one.add_argument("--seed", type=int, default=17)
    one.add_argument("--engine", default="0.5.13")
    one.add_argument("--revert", type=int)
    one.add_argument("--mutants", default="")
    one.add_argument("--long", type=int, default=0)
    one.add_argument("--seconds", type=float, default=300.0)
    one.add_argument("--reference-device", default="cuda")
    one.add_argument("--out", type=Path, required=True)
    shown = commands.add_parser("table")
    shown.add_argument("files", type=Path, nargs="+")
    asked = parser.parse_args()
    return run(asked) if asked.command == "run" else table(asked.files)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    raise SystemExit(main())
