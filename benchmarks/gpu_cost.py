"""What the probe costs on a GPU: the same scenarios on engines that differ in their probe level only, turn by turn.

Engines of every level are up at once and take turns scenario by scenario in an order that rotates, so that the
machine's mood hits all. Two engines that were started alike differ by more than the probe costs, for as long as they
live, so there are several of a level, and one more level needs no engines of its own: `resting`, those of the level
`full` when they are not asked to record. **Every level is driven through the same gate**: a ratio states what the probe
costs, and nothing of what lockstep does."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from benchmarks import deep
from cases import checkpoints
from cases.fixed import default_scenarios
from cases.recipes import Recipe
from harness.contract.trace import Trace
from harness.contract.types import Scenario
from harness.driving.drive import drive
from harness.engines import envs
from harness.engines.engine import Engine
from harness.engines.launch import ProbeLevel

if TYPE_CHECKING:
    from benchmarks.gpu_jobs import Timed

#: Models as wide and deep as small real ones: what the probe costs there is what it costs a user.
SIZES = {
    "medium": Recipe(
        name="bench-medium",
        seed=7,
        vocab=32000,
        hidden=1024,
        intermediate=2816,
        layers=8,
        heads=8,
        kv_heads=4,
        head_dim=128,
    ),
    "large": Recipe(
        name="bench-large",
        seed=7,
        vocab=32000,
        hidden=2048,
        intermediate=5632,
        layers=16,
        heads=16,
        kv_heads=4,
        head_dim=128,
    ),
}


#: Engines that could record, and do not.
RESTING = "resting"


@dataclass(slots=True)
class Seen:
    """One level's times: repeat -> scenario -> seconds, and for each (engine, scenario, turn) the seconds."""

    whole: list[list[float]] = field(default_factory=list)
    turns: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)

    def totals(self) -> list[float]:
        return [sum(each) for each in self.whole]

    def usual_turns(self) -> dict[tuple[int, int, int], float]:
        """(engine, scenario, turn) -> median seconds."""
        return {place: statistics.median(times) for place, times in self.turns.items()}

    def of_engines(self) -> list[float]:
        """What a turn usually takes on each engine, in milliseconds."""
        by_engine: dict[int, list[float]] = {}
        for (engine, _, _), seconds in self.usual_turns().items():
            by_engine.setdefault(engine, []).append(1e3 * seconds)
        return [round(statistics.mean(by_engine[engine]), 4) for engine in sorted(by_engine)]


def scenarios_for(name: str, on: Callable[[Scenario, bool], Scenario]) -> list[Scenario]:
    """Default scenarios of one boot. name: '', 'medium-', 'large-' or 'deep-', then 'eager' or 'graphs'."""
    default = default_scenarios()
    size, _, mode = name.rpartition("-")
    found = [on(one, mode == "graphs") for one in default if one.boot_key() == default[0].boot_key()]
    if size in SIZES:
        checkpoints.RECIPES[SIZES[size].name] = SIZES[size]
        found = [one.model_copy(update={"checkpoint": SIZES[size].name}) for one in found]
    return found


def cost(
    options: argparse.Namespace, scenarios: Sequence[Scenario], make: Callable[[str], Timed], alone: Any
) -> dict[str, Any]:
    """Seconds of the scenarios by level, and whether the levels commit the same tokens."""
    levels: list[str] = options.levels.split(",")
    hosts = {(level, n): make(f"{level}-{n}") for level in levels if level != RESTING for n in range(options.each)}
    seen = {level: Seen() for level in levels}
    committed: dict[str, list[Any]] = {}
    try:
        launches = {
            key: host.launch(scenarios[0], engine=options.engine, probe=cast(ProbeLevel, key[0]))
            for key, host in hosts.items()
        }
        if options.name.startswith("deep-"):
            root = envs.home() / "checkpoints"
            launches = {key: deep.launched(launch, root) for key, launch in launches.items()}
        with ThreadPoolExecutor(len(hosts)) as pool:
            booted = pool.map(lambda key: hosts[key].use(launches[key]), hosts)
            engines = dict(zip(hosts, booted, strict=True))
        await_others(options)
        with alone(options.out):
            start = time.monotonic()
            for repeat in range(options.repeats + options.each):
                if repeat > options.each and time.monotonic() - start > options.limit:
                    break
                committed = _one_repeat(engines, scenarios, seen, repeat=repeat, each=options.each)
    finally:
        for host in hosts.values():
            host.close()
    *_, last = hosts.values()
    return {**_summary(seen, committed), "scenarios": len(scenarios), "each": options.each, "header": last.header}


def await_others(options: argparse.Namespace) -> None:
    """Until as many jobs as there are to measure here have booted, or it takes too long."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"booted-{options.name}").touch()
    deadline = time.monotonic() + options.patience
    while len(list(options.out.glob("booted-*"))) < options.together and time.monotonic() < deadline:
        time.sleep(0.05)


def _one_repeat(
    engines: dict[tuple[str, int], Engine],
    scenarios: Sequence[Scenario],
    seen: dict[str, Seen],
    *,
    repeat: int,
    each: int,
) -> dict[str, list[Any]]:
    """Every scenario on one engine of every level, whose order rotates; the first on an engine only fills caches."""
    committed: dict[str, list[Any]] = {level: [] for level in seen}
    whole: dict[str, list[float]] = {level: [] for level in seen}
    levels, number = list(seen), repeat % each
    for place, scenario in enumerate(scenarios):
        first = (repeat + place) % len(levels)
        for level in levels[first:] + levels[:first]:
            engine = engines[("full" if level == RESTING else level), number]
            trace, marks = timed(engine, scenario, record=level != RESTING)
            whole[level].append(marks[-1] - marks[0])
            committed[level].append(committed_by(trace))
            if repeat >= each:
                for turn, (before, after) in enumerate(pairwise(marks)):
                    seen[level].turns.setdefault((number, place, turn), []).append(after - before)
    for level in levels if repeat >= each else ():
        seen[level].whole.append(whole[level])
    return committed


def timed(engine: Engine, scenario: Scenario, *, record: bool = True) -> tuple[Trace, list[float]]:
    """A scenario's trace, and when it began, when each of its turns ended, and when all was done."""
    marks = [time.perf_counter()]
    trace = drive(engine, scenario, record=record, on_turn=lambda _tick, _state: marks.append(time.perf_counter()))
    return trace, [*marks, time.perf_counter()]


def _summary(seen: dict[str, Seen], committed: dict[str, list[Any]]) -> dict[str, Any]:
    """Ratios to the first level: of the quickest repeats, of the medians, and of each repeat with its neighbour.

    by_turn_medians: of what an engine usually takes for each turn, summed over turns and engines.
    """
    levels = list(seen)
    base, usual = seen[levels[0]].totals(), seen[levels[0]].usual_turns()
    found: dict[str, Any] = {
        "rounds": sum(len(one["rounds"]) for one in committed[levels[0]]),
        "turns": len(usual),
        "repeats": len(base),
        "seconds": {level: [round(total, 4) for total in one.totals()] for level, one in seen.items()},
        "ms_a_turn": 1e3 * sum(usual.values()) / max(1, len(usual)),
        "ms_a_turn_of_engines": {level: one.of_engines() for level, one in seen.items()},
        "same_texts": all(_texts(committed[level]) == _texts(committed[levels[-1]]) for level in levels),
        "same_rounds": committed["tokens"] == committed["full"] if "tokens" in committed else None,
    }
    for level in levels[1:]:
        totals, turns = seen[level].totals(), seen[level].usual_turns()
        each = sorted(mine / other for mine, other in zip(totals, base, strict=True))
        more = [1e3 * (turns[place] - usual[place]) for place in usual if place in turns]
        found[f"{level}_ratios"] = {
            "by_turn_medians": sum(turns.values()) / sum(usual.values()),
            "of_quickest": min(totals) / min(base),
            "of_medians": statistics.median(totals) / statistics.median(base),
            "of_repeats": [round(one, 3) for one in (each[0], statistics.median(each), each[-1])],
        }
        found[f"{level}_more_ms_a_turn"] = [round(one, 3) for one in (statistics.mean(more), statistics.median(more))]
    if RESTING in seen and "full" in seen:
        rests = seen[RESTING].of_engines()
        found["full_over_resting"] = [
            round(full / rest, 3) for full, rest in zip(seen["full"].of_engines(), rests, strict=True)
        ]
    return found


def committed_by(trace: Trace) -> dict[str, Any]:
    """What a run committed: texts, and for each batch its requests, where they began and how much was accepted."""
    return {
        "texts": sorted((end.rid, end.reason, end.output_ids) for end in trace.ends),
        "rounds": [(one.mode, one.rids, one.starts, one.lens, one.final) for one in trace.rounds],
    }


def _texts(committed: list[dict[str, Any]]) -> list[Any]:
    return [one["texts"] for one in committed]


def line_of(document: dict[str, Any]) -> str:
    """What a table says of one job."""
    parts = [f"{document['ms_a_turn']:.2f} ms a turn untraced, {document['repeats']} repeats"]
    for name, ratios in document.items():
        if name.endswith("_ratios"):
            level = name.removesuffix("_ratios")
            low, middle, high = ratios["of_repeats"]
            more = document[f"{level}_more_ms_a_turn"]
            parts.append(
                f"{level} {ratios['by_turn_medians']:.3f} by turns, quickest {ratios['of_quickest']:.3f}, medians "
                f"{ratios['of_medians']:.3f}, repeats {middle:.3f} [{low:.3f} {high:.3f}], {more[0]:+.2f} ms a turn"
            )
    engines = {
        level: " ".join(f"{one:.2f}" for one in found) for level, found in document["ms_a_turn_of_engines"].items()
    }
    parts.append(f"ms a turn of each engine: {engines}")
    if "full_over_resting" in document:
        parts.append(f"full over resting, engine by engine: {document['full_over_resting']}")
    return "; ".join(parts) + f"; same texts {document['same_texts']}, same rounds {document['same_rounds']}"
