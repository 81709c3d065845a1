"""One job of `benchmarks.gpu` in a process of its own: an engine on the card, scenarios, and a JSON document.

python -m benchmarks.gpu_jobs generated NAME --count 50 --seed 1 --engine 0.5.13 --out FOLDER --json FILE
python -m benchmarks.gpu_jobs cost graphs --engine 0.5.13 --out FOLDER --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_numbers import Numbers
from cases.fixed import default_scenarios
from cases.hunt import Hunt, as_json, greedy_text
from cases.strategies import BOOTS, Boot, programs
from harness import envs
from harness.engine import EngineError
from harness.launch import ProbeLevel
from harness.live import LiveEngines
from harness.trace import Trace
from harness.types import Scenario, SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A boot configuration of the generator with the engine options that only a GPU has."""

    boot: str
    dtype: str = "float16"
    backend: str = "triton"
    graphs: bool = True
    overlap: bool | None = None

    def of(self, scenario: Scenario) -> Scenario:
        options = {name: getattr(self, name) for name in ("dtype", "backend", "graphs", "overlap")}
        return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=options)})


#: Two steps: with three, every release drafts trees in a way that is a finding of its own (docs/findings.md F-003).
TREES = {
    boot.name: boot
    for boot in (
        Boot(name="short-tree", why="two candidates a step, five nodes", spec=SpecConfig(k=2, t=2, n=5)),
        Boot(name="short-wide-tree", why="eight candidates a step", spec=SpecConfig(k=2, t=8, n=16)),
    )
}

COMBINATIONS: dict[str, Combination] = {
    "plain-graphs": Combination(boot="plain"),
    "plain-eager": Combination(boot="plain", graphs=False),
    "plain-graphs-bf16": Combination(boot="plain", dtype="bfloat16"),
    "plain-graphs-normal-loop": Combination(boot="plain", overlap=False),
    "pages-graphs": Combination(boot="pages"),
    "pages-eager-normal-loop": Combination(boot="pages", graphs=False, overlap=False),
    "small-pool-graphs": Combination(boot="small-pool"),
    "no-cache-graphs": Combination(boot="no-cache"),
    "long-draft-graphs-bf16": Combination(boot="long-draft", dtype="bfloat16"),
    "one-step-graphs": Combination(boot="one-step"),
    "tree-graphs": Combination(boot="short-tree"),
    "tree-eager-bf16": Combination(boot="short-tree", graphs=False, dtype="bfloat16"),
    "plain-graphs-flashinfer": Combination(boot="plain", backend="flashinfer"),
    "wide-tree-graphs-flashinfer": Combination(boot="short-wide-tree", backend="flashinfer"),
}


def generated(options: argparse.Namespace, engines: LiveEngines) -> dict[str, Any]:
    """Scenarios of one combination until they are done or the time is over."""
    chosen = COMBINATIONS[options.name]
    boot = {**BOOTS, **TREES}[chosen.boot]
    folder = options.out / "runs" / f"generated-{options.name}"
    hunt = Hunt(engines=engines, release=options.engine, folder=folder)
    drawn = programs(boot, count=options.count, seed_value=options.seed, greedy=greedy_text(boot.spec))
    start = time.monotonic()
    ties = choices = 0
    graphs: dict[str, int] = {}
    spent = {"engine": 0.0, "judged": 0.0}
    error, numbers = "", Numbers()
    for scenario in drawn:
        try:
            outcome = _timed(hunt, chosen.of(scenario), spent)
        except EngineError as failure:
            error = str(failure)
            break
        if outcome.passed:
            numbers.add(outcome.trace, outcome.reference)
        ties += outcome.verdict.ties
        choices += outcome.verdict.compared.get("proposals", 0) + outcome.verdict.compared.get("accepts", 0)
        for phase, count in in_graphs(outcome.trace).items():
            graphs[phase] = graphs.get(phase, 0) + count
        if time.monotonic() - start > options.limit:
            error = f"stopped after {options.limit} s"
            break
    header = engines.header
    return {
        **as_json(hunt),
        "combination": dataclasses.asdict(chosen),
        "header": header,
        "in_graphs": graphs,
        "engine_error_over_own": numbers.summary(),
        "ties": ties,
        "choices": choices,
        "spent": spent,
        "boot_seconds": engines.boot_seconds,
        "wall": time.monotonic() - start,
        "error": error,
    }


def _timed(hunt: Hunt, scenario: Scenario, spent: dict[str, float]) -> Any:
    before, boots = hunt.engines.engine_seconds, sum(hunt.engines.boot_seconds)
    start = time.monotonic()
    outcome = hunt.drive(scenario)
    engine = hunt.engines.engine_seconds - before
    spent["engine"] += engine
    spent["judged"] += time.monotonic() - start - engine - (sum(hunt.engines.boot_seconds) - boots)
    return outcome


def in_graphs(trace: Trace) -> dict[str, int]:
    """Rounds by phase and how they ran: 'DRAFT in 4' for a graph of four requests, 'DRAFT eager'."""
    found: dict[str, int] = {}
    for record in trace.rounds:
        for phase in record.forwards:
            how = f"{phase} in {record.graphs[phase]}" if phase in record.graphs else f"{phase} eager"
            found[how] = found.get(how, 0) + 1
    return found


def cost(options: argparse.Namespace, engines: LiveEngines) -> dict[str, Any]:
    """Wall time of the default scenarios by probe level, repeated, and whether the levels commit the same tokens."""
    scenarios = [
        Combination(boot="plain", graphs=options.name == "graphs").of(scenario)
        for scenario in default_scenarios()
        if scenario.boot_key() == default_scenarios()[0].boot_key()
    ]
    seconds: dict[str, list[float]] = {}
    committed: dict[str, list[Any]] = {}
    levels: tuple[ProbeLevel, ...] = ("off", "tokens", "full")
    for level in levels:
        launch = engines.launch(scenarios[0], engine=options.engine, probe=level)
        for repeat in range(options.repeats + 1):
            start = time.monotonic()
            traces = [engines.drive(launch, scenario) for scenario in scenarios]
            if repeat:  # the first fills caches
                seconds.setdefault(level, []).append(time.monotonic() - start)
        committed[level] = [committed_by(trace) for trace in traces]
    best = {level: min(times) for level, times in seconds.items()}
    return {
        "scenarios": len(scenarios),
        "seconds": seconds,
        "traced_over_untraced": best["full"] / best["off"],
        "tokens_over_untraced": best["tokens"] / best["off"],
        "same_texts": committed["off"] == [{**one, "rounds": []} for one in committed["full"]],
        "same_rounds": committed["tokens"] == committed["full"],
        "header": engines.header,
    }


def committed_by(trace: Trace) -> dict[str, Any]:
    """What a run committed: texts, and for each batch its requests, where they began and how much was accepted."""
    return {
        "texts": sorted((end.rid, end.reason, end.output_ids) for end in trace.ends),
        "rounds": [(one.mode, one.rids, one.starts, one.lens, one.final) for one in trace.rounds],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generated", "cost"))
    parser.add_argument("name")
    parser.add_argument("--engine", default="0.5.13")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no scenario is begun")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)
    engines = Timed(
        environment=lambda version: envs.ensure(version, print),
        default=options.engine,
        device="cuda",
        logs=options.out / "logs" / f"{options.what}-{options.name}",
    )
    try:
        document = generated(options, engines) if options.what == "generated" else cost(options, engines)
    finally:
        engines.close()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1, default=str))
    return 0


class Timed(LiveEngines):
    """Live engines that remember what driving and booting took, and the last handshake."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.engine_seconds, self.boot_seconds = 0.0, []
        self.header: dict[str, Any] = {}

    def use(self, launch: Any) -> Any:
        boots, start = self.boots, time.monotonic()
        engine = super().use(launch)
        if self.boots > boots:
            took = time.monotonic() - start
            self.boot_seconds.append(round(took, 1))
            self.engine_seconds -= took  # a boot is no part of driving
        self.header = dict(engine.handshakes[0])
        return engine

    def drive(self, *args: Any, **kwargs: Any) -> Trace:
        start = time.monotonic()
        try:
            return super().drive(*args, **kwargs)
        finally:
            self.engine_seconds += time.monotonic() - start


if __name__ == "__main__":
    raise SystemExit(main())
