"""What the probe and judging cost: the same scenarios on engines with and without a probe, step by step.

    .venv/bin/python -m benchmarks.cost [--engine 0.5.23] [--repeats 3] [--each 1] [--device cuda [--graphs]]
        [--size medium | --pair DIR/llama-1b] [--dtype bfloat16] [--gpu-share 1.5] [--profile]

Engines of both levels are up at once, driven in the same lockstep, and alternate scenario by scenario, so that the
machine's mood hits both. Two engines that were started alike may differ by more than the probe costs, for as long as
they live: --each says how many of a level there are. Then what the reference, judging and storing add, but for --pair:
one of `benchmarks.make_real_size`. --profile: two more engines tell whose the scheduler's time is, call by call; with
--each 0 they are the only ones.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks._bench import booted, count, ended, machine, oracle
from cases import pairs
from cases.recipes import Recipe
from harness.archive.writer import RunWriter
from harness.checks.judge import judge
from harness.cli.judges import engine_share
from harness.cli.prepare import gpu_lease
from harness.cli.programs import choose_scenarios
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.driving.adapt import Wanted, adapted
from harness.driving.drive import drive
from harness.driving.own_pair import OwnPair, own_pair
from harness.engines.engine import Engine
from harness.engines.envs import NEWEST

#: What the project promises of the whole, against an untraced engine.
LIMIT = 1.25
#: Whether engines of a level have a probe; those of --profile have a clock around each call of ours.
LEVELS = {"untraced": False, "traced": True}
CLOCKED = {"untraced, clocked": False, "traced, clocked": True}
#: Which of a scheduler step's repeats count: the quickest is what is left where others take the machine's cores.
OF_REPEATS: dict[str, Callable[[list[float]], float]] = {"medians": statistics.median, "quickest": min}
#: Below this an owner has no line, in microseconds a scheduler step.
WORTH_A_LINE = 0.3
#: Models as wide and deep as small real ones: what the probe costs there is what it costs a user.
SIZES = {
    "medium": {"hidden": 1024, "intermediate": 2816, "layers": 8, "heads": 8},
    "large": {"hidden": 2048, "intermediate": 5632, "layers": 16, "heads": 16},
}
#: (engine, scenario, scheduler step) -> seconds of each repeat.
StepSeconds = dict[tuple[int, int, int], list[float]]


def scenarios_of(size: str, *, device: str, graphs: bool, dtype: str | None, own: OwnPair | None) -> list[Scenario]:
    """The default scenarios of one boot configuration, on a pair of that size, or on an own one."""
    # several engines load large weights on one card at once
    wanted = Wanted(cuda_graph=graphs or None, dtype=dtype, mem_fraction_static=None if own is None else 0.9)
    found = adapted(choose_scenarios([], [], own=own), wanted, device=device)
    if size == "tiny" or own is not None:
        return found
    recipe = Recipe(name=f"bench-{size}", seed=7, vocab=32000, kv_heads=4, head_dim=128, **SIZES[size])
    pairs.RECIPES[recipe.name] = recipe
    return [one.model_copy(update={"checkpoint": recipe.name}) for one in found]


def timed(engine: Engine, scenario: Scenario, *, record: bool) -> tuple[Trace, list[float]]:
    """A scenario's trace, and when it began, when each of its scheduler steps ended, and when all was done."""
    marks = [time.perf_counter()]
    trace = drive(
        engine, scenario, record=record, on_step=lambda _scheduler_step, _state: marks.append(time.perf_counter())
    )
    return trace, [*marks, time.perf_counter()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of each level: seconds by scheduler step, the last traces, and what clocks said: owner -> [nanoseconds, calls].

    ticks: scheduler steps that the clocks cover.
    """

    steps: dict[str, StepSeconds]
    traces: dict[str, list[Trace]]
    spent: dict[str, Counter[str]]
    ticks: Counter[str]


def measured(engines: dict[str, list[Engine]], scenarios: Sequence[Scenario], *, repeats: int) -> Measured:
    """The first round on an engine only fills caches. engines: by level, an untraced one first, then a traced one."""
    found = Measured(
        steps={level: {} for level in engines},
        traces={},
        spent={level: Counter() for level in engines},
        ticks=Counter(),
    )
    each = max(map(len, engines.values()))
    for repeat in range((repeats + 1) * each):
        found.traces.update({level: [] for level in engines})
        for place, scenario in enumerate(scenarios):
            order = list(engines) if (repeat + place) % 2 else list(reversed(engines))
            for level in order:
                record = {**LEVELS, **CLOCKED}[level]
                number = repeat % len(engines[level])
                trace, marks = timed(engines[level][number], scenario, record=record)
                found.traces[level].append(trace)
                if repeat < each:
                    continue
                for step, (before, after) in enumerate(pairwise(marks)):
                    found.steps[level].setdefault((number, place, step), []).append(after - before)
                found.ticks[level] += len(marks) - 2
                for event in trace.named("spent"):
                    found.spent[level].update({who: spent[0] for who, spent in event.data["spent"].items()})
        so_far = f", traced over untraced {ratio(*found.steps.values()):.3f}" if repeat >= each else ""
        print(f"round {repeat + 1} of {(repeats + 1) * each} done{so_far}", flush=True)
    return found


def ratio(untraced: StepSeconds, traced: StepSeconds, *_clocked: StepSeconds) -> float:
    """Of what scheduler steps usually take."""
    return usual(traced) / usual(untraced)


def judging(scenarios: Sequence[Scenario], traces: Sequence[Trace], *, device: str) -> dict[str, float]:
    """Seconds by part of what comes behind the engine."""
    name = pairs.on_device(scenarios[0].checkpoint, device)
    reference, spent = oracle(name), dict.fromkeys(("reference", "judge", "store"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter.create(Path(folder), manifest={"argv": ["cost"]})
        for scenario, trace in zip(scenarios, traces, strict=True):
            marks = [time.perf_counter()]
            answer = reference.answer(scenario, trace)
            marks.append(time.perf_counter())
            verdict, found = judge(scenario, trace, answer)
            marks.append(time.perf_counter())
            writer.save_scenario(scenario, engine=trace, reference=answer, verdict=verdict, divergences=found)
            marks.append(time.perf_counter())
            for name, (before, after) in zip(spent, pairwise(marks), strict=True):
                spent[name] += after - before
    return spent


def usual(steps: StepSeconds) -> float:
    """What the scenarios usually take on one engine: medians of scheduler steps, summed."""
    return statistics.mean(by_engine(steps, statistics.median))


def by_engine(steps: StepSeconds, of: Callable[[list[float]], float]) -> list[float]:
    """Seconds of each engine; of: which of a scheduler step's repeats count."""
    found: defaultdict[int, float] = defaultdict(float)
    for (engine, _, _), seconds in steps.items():
        found[engine] += of(seconds)
    return [found[engine] for engine in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default=NEWEST)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--each", type=count, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--size", choices=("tiny", *SIZES), default="tiny")
    parser.add_argument("--pair", type=Path)
    parser.add_argument("--gpu-share", type=float)
    parser.add_argument("--dtype")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    own = None if options.pair is None else own_pair(options.pair / "target", options.pair / "draft")
    scenarios = scenarios_of(options.size, device=options.device, graphs=options.graphs, dtype=options.dtype, own=own)
    share = options.gpu_share
    if own is not None and options.device == "cuda" and share is None:
        share = engine_share(own, scenarios)
    lease = gpu_lease(options.device, share)
    with contextlib.ExitStack() as stack:

        def boot(level: str) -> Engine:
            about = {"version": options.engine, "device": options.device, "own": own, "lease": lease}
            probe, clock = {**LEVELS, **CLOCKED}[level], level in CLOCKED
            return stack.enter_context(booted(scenarios[0], probe=probe, clock=clock, **about))

        asked = dict.fromkeys(LEVELS if options.each else (), options.each)
        asked |= dict.fromkeys(CLOCKED if options.profile else (), 1)
        with ThreadPoolExecutor() as pool:  # they boot side by side
            booting = {level: [pool.submit(boot, level) for _ in range(each)] for level, each in asked.items()}
        engines = {level: [one.result() for one in some] for level, some in booting.items()}
        found = measured(engines, scenarios, repeats=options.repeats)
    untraced, traced, *_ = asked
    parts = {f"{level} engine": usual(found.steps[level]) for level in (untraced, traced)}
    parts |= {} if own else judging(scenarios, found.traces[traced], device=options.device)
    pair = options.pair.name if own else options.size
    for level, each in asked.items():
        print(f"{level}, {len(found.steps[level]) // each} scheduler steps, seconds of each engine:")
        for name, of in OF_REPEATS.items():
            print(f"  {name:<9}" + " ".join(f"{seconds:.3f}" for seconds in by_engine(found.steps[level], of)))
    if options.profile:
        profile(found)
    title = f"SGLang {options.engine} on {options.device}, {pair} pair"
    return report(parts, plain=f"{untraced} engine", title=title)


def profile(found: Measured) -> None:
    """Microseconds of the scheduler's thread, on a processor, a scheduler step: by who has them."""
    spent = {
        level: {who: nanoseconds / 1000 / found.ticks[level] for who, nanoseconds in found.spent[level].items()}
        for level in CLOCKED
    }
    untraced, traced = spent.values()
    print(f"\n{'microseconds of the thread a scheduler step':<56}{'untraced':>10}{'traced':>10}")
    for who in sorted(traced, key=lambda one: -traced[one]):
        if max(traced[who], untraced.get(who, 0.0)) >= WORTH_A_LINE:
            print(f"{who:<56}{untraced.get(who, 0.0):>10.1f}{traced[who]:>10.1f}")
    sums = sum(untraced.values()), sum(traced.values())
    print(f"{'together':<56}{sums[0]:>10.1f}{sums[1]:>10.1f}   ({sums[1] / sums[0]:.3f})")


def report(parts: dict[str, float], *, plain: str, title: str) -> int:
    print(f"\n{title}, default scenarios; {machine()}\n{'part':<26}{'seconds':>9}{'ratio':>9}")
    base = parts[plain]
    for name, seconds in parts.items():
        print(f"{name:<26}{seconds:>9.2f}{seconds / base:>9.3f}")
    total = sum(parts.values()) - base
    print(f"{'traced and judged':<26}{total:>9.2f}{total / base:>9.3f}   (limit {LIMIT})")
    return 0 if total / base <= LIMIT else 1


if __name__ == "__main__":
    ended(main)
