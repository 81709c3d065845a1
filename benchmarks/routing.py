"""Routing that nearly ties, on an engine: a mixture of experts in bfloat16 on a CPU, judged three times.

    python -m benchmarks.routing PAIR... --engine 0.5.23

PAIR is a folder with `target` (its routers called mlp.gate) and `draft`. The same traces are judged with near ties
followed, as `eaglecheck run` does; without; and by references one of whose routers is 15 % wrong, each router in turn,
where some must fail. A draft that reads features (EAGLE-3) shows no state behind the last of them: a router there shows
in logits alone. `run` takes no bfloat16 on a CPU: dense pairs and these were tried there, others were not. Prints a
Markdown table; exits 1 unless the first of them alone passes all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import copytree
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from benchmarks._bench import ended, machine
from cases import fixed
from harness.cli import prepare
from harness.contract.settings import SpecConfig
from harness.contract.trace import Trace
from harness.contract.types import Outcome
from harness.driving import oracle
from harness.driving.adapt import Wanted
from harness.driving.judging import judge_with, load_oracle
from harness.driving.own_pair import OwnPair, own_pair
from harness.driving.plan import Plan
from harness.driving.pool import EnginePool
from harness.driving.results import ScenarioResult
from harness.engines import envs, launch

DTYPE, WRONG = "bfloat16", 0.15
SHAPES = ("four-together", "chunk-borders", "shared-prefix")


def driven(pair: OwnPair, release: str, logs: Path) -> tuple[Plan, list[Trace]]:
    """The scenarios of SHAPES, and what the engine did."""
    scenarios = list(fixed.shapes(spec=SpecConfig(algorithm=pair.algorithm), only=SHAPES))
    engines = EnginePool(logs=logs, copies=True)
    with patch.dict(launch.DTYPES, cpu=(DTYPE,)):
        plan = prepare.make_plan(
            scenarios, say=print, engine=release, device="cpu", own=pair, wanted=Wanted(dtype=DTYPE), runs=logs
        )
        try:
            return plan, [engines.drive(plan.launch(one, lease=None), one) for one in plan.scenarios]
        finally:
            engines.end()


def judged(plan: Plan, traces: Sequence[Trace], target: Path, draft: Path) -> list[ScenarioResult]:
    """By a reference of these two folders."""
    reference = load_oracle(target, draft, ())
    return [
        judge_with(reference, one, trace, setup=plan.setup) for one, trace in zip(plan.scenarios, traces, strict=True)
    ]


def misrouted(target: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """Copies of a target, each with errors in the weights of one router; its name and the folder."""
    tensors = load_file(target / "model.safetensors")
    for name in sorted(name for name in tensors if name.endswith("mlp.gate.weight")):
        folder, random = place / name, torch.Generator().manual_seed(1)
        copytree(target, folder)
        errors = WRONG * torch.randn(tensors[name].shape, generator=random)
        wrong = (tensors[name].float() * (1 + errors)).to(tensors[name].dtype)
        save_file({**tensors, name: wrong}, folder / "model.safetensors", metadata={"format": "pt"})
        yield name, folder


def line(pair: Path, how: str, results: Sequence[ScenarioResult]) -> str:
    events = [event.data for one in results if one.reference for event in one.reference.named("routing")]
    roots = sorted({finding.signature for one in results for finding in one.findings if finding.is_root})
    outcomes = [one.verdict.outcome for one in results]
    values = (
        *(pair.name, how, f"{outcomes.count(Outcome.PASS)} of {len(outcomes)} PASS"),
        sum(one.verdict.compared.get("hidden_rows", 0) for one in results),
        *(sum(len(event["rows"]) for event in events), f"{sum(event['usual'] for event in events):.1f}"),
        ", ".join(f"`{one}`" for one in roots),
    )
    return f"| {' | '.join(map(str, values))} |"


def lines(folder: Path, release: str, place: Path) -> Iterator[tuple[str, bool]]:
    """A line a judgement, and whether it says what it should."""
    pair = own_pair(folder / "target", (folder / "draft").resolve())
    assert pair is not None
    plan, traces = driven(pair, release, place)
    target, draft = pair.folders
    followed = judged(plan, traces, target, draft)
    yield line(folder, "followed", followed), all(one.verdict.outcome is Outcome.PASS for one in followed)
    with patch.object(oracle, "with_turned_ties", lambda truth, *_: truth):
        plain = judged(plan, traces, target, draft)
    yield line(folder, "not followed", plain), any(one.verdict.outcome is Outcome.FAIL for one in plain)
    for name, other in misrouted(target, place / folder.name):
        wrong = judged(plan, traces, other, other if draft == target else draft)
        yield line(folder, f"`{name}` wrong", wrong), any(one.verdict.outcome is Outcome.FAIL for one in wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", type=Path)
    parser.add_argument("--engine", default=envs.NEWEST)
    asked = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="eaglecheck-routing-") as place:
        print("| pair | near ties | verdicts | rows | rows tied | expected | why |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for folder in asked.pairs:
            for text, right in lines(folder, asked.engine, Path(place)):
                good &= right
                print(text, flush=True)
    print(f"\nSGLang {asked.engine}, {DTYPE}; {machine()}")
    return 0 if good else 1


if __name__ == "__main__":
    ended(main)
