"""`eaglecheck matrix --nights`: plans a night or one shard of it, drives it, keeps it, and judges a whole one.

It must not start an engine before everything that can be refused was refused.
"""

from __future__ import annotations

import math
import platform
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cases import catalogue, known
from cases.families import FAMILIES
from harness.both_sides import gpus
from harness.cli import prepare
from harness.cli.outcome import BY_OUTCOME, Exit, kept, typed_again
from harness.cli.scenario_checks import check_scenarios
from harness.contract.outputs import check_named, writable, write_json
from harness.contract.usage import UsageError, unknown
from harness.contract.words import counted, some
from harness.driving.adapt import Wanted
from harness.driving.live import LiveEngines
from harness.driving.own_source import git_state, own_version, source_digest
from harness.engines import envs
from harness.night import document, store
from harness.night.cells import Cell, Limits, left_out, plan
from harness.night.judge import Judgement, judge
from harness.night.records import CellResult, Judged, Night, NightPlan
from harness.night.run import Driver
from harness.night.store import Kept
from harness.night.text import render_cell, render_night
from reports.prose import say

ALL = "all"
#: What is generated for a family on one release unless somebody says otherwise, and how often a failure is repeated.
SECONDS, SCENARIOS, REPEATS = 600.0, 120, 2
#: Seeds are short enough to be typed again.
SEEDS = 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed. shard None: the whole night. seconds, scenarios: each family's limits on one release.

    resume: the id of a night in `nights` that was cut off.
    """

    nights: Path
    engines: str | None = None
    cases: str | None = None
    families: str | None = None
    shard: str | None = None
    seconds: float = SECONDS
    scenarios: int = SCENARIOS
    mutants: int = 0
    seed: int | None = None
    repeats: int = REPEATS
    known: Path | None = None
    device: str = "cpu"
    revert: int | None = None
    gpu_share: float | None = None
    boots_ahead: int | None = None
    resume: str | None = None
    wanted: Wanted = field(default_factory=Wanted)

    @property
    def chosen_cases(self) -> list[str]:
        return _named(self.cases, catalogue.names(), what="case")

    @property
    def chosen_families(self) -> list[str]:
        return _named(self.families, list(FAMILIES), what="family")


def check_store(root: Path) -> None:
    """UsageError or StoreError before hours are spent, for a store that could not be judged with after them."""
    check_named(root, option="nights")
    if root.exists() and not root.is_dir():
        raise UsageError(f"--nights {root}: that is not a folder\n  name a folder, there or not:  --nights nights")
    for half in store.torn(root, deep=False):
        raise UsageError(
            f"{half} holds {store.NIGHT} and no {store.PLAN}: what that night set out to do is not known\n"
            f"  put its {store.PLAN} back, or move it away to go on without it:  mv {half} {half.name}.torn"
        )
    store.nights(root)


def run_night(asked: Asked, *, console: Console, json: str | None) -> Exit:
    """The whole of it. Exits 0 for a green night, 1 or 3 for a red one; a shard is not judged and exits 0."""
    entries = known.read(asked.known)
    shard = prepare.shard_of(asked.shard)
    prepare.check_device(asked.device)
    lease = prepare.gpu_lease(asked.device, asked.gpu_share)
    cells = _checked_cells(asked)
    todo = _plan(asked, cells, shard)
    check_store(asked.nights)
    writable(asked.nights, option="nights")
    before: dict[str, CellResult] = {}
    if asked.resume is not None:
        todo, before = _cut_off(asked.nights, asked.resume, todo)
    share = [cell for cell in cells if cell.key in {*todo.mine} and cell.key not in before]
    versions, told = dict.fromkeys(cell.engine for cell in share), partial(say, console)
    environments = {version: prepare.engine_environment(version, told) for version in versions}
    folder = store.begin(asked.nights, todo, again=asked.resume is not None)
    say(console, f"night {todo.id}: {_share(todo)}, seed {todo.seed}; kept in {folder}")
    say(console, _ahead(share), style="dim")
    for line in todo.not_planned:
        say(console, f"not planned: {line}", style="dim")

    def engines() -> LiveEngines:
        return LiveEngines(
            environment=environments.__getitem__,
            default=cells[0].engine,
            device=asked.device,
            logs=folder / "logs",
            lease=lease,
            copies=True,
            ahead=prepare.BOOTS_AHEAD[asked.device] if asked.boots_ahead is None else asked.boots_ahead,
        )

    def done(result: CellResult) -> None:
        store.add(folder, result)
        render_cell(console, result)

    driver = Driver(
        make=engines,
        folder=folder,
        device=asked.device,
        revert=asked.revert,
        repeats=asked.repeats,
        wanted=asked.wanted,
        done=done,
        results=before,
    )

    def left() -> str:
        return _left(folder, todo, done=len(driver.results), seeded=asked.seed is not None)

    with kept(json, lambda _stop: _by_now(driver, todo, asked.nights, entries), left=left):
        driver.run(share)
    night = Night(plan=todo, finished=_now(), cells=tuple(driver.results[key] for key in todo.mine))
    store.finish(folder, night)
    if todo.shard[1] > 1:
        return _shard_done(asked, night, console=console, json=json)
    return conclude(folder, night, root=asked.nights, entries=entries, console=console, json=json)


#: Of a plan, what one sitting has and another has not.
OF_A_SITTING = {"id", "created", "host"}


def _cut_off(root: Path, name: str, todo: NightPlan) -> tuple[NightPlan, dict[str, CellResult]]:
    """A night that was cut off, and its cells; UsageError unless the same code was asked for the same cells."""
    cut = {one.plan.id: one for one in store.nights(root) if one.night is None}
    if name not in cut:
        raise UsageError(unknown("unfinished night", name, [*cut]) + f"\n  they are in --nights {root}")
    then, now = cut[name].plan.model_dump(exclude=OF_A_SITTING), todo.model_dump(exclude=OF_A_SITTING)
    for key in (key for key in then if then[key] != now[key]):
        raise UsageError(
            f"--resume {name}: {key} was another when that night began\n  then {_short(then[key])}\n"
            f"  now  {_short(now[key])}\n"
            "  a night is of one plan and one state of the code; without --resume another begins"
        )
    return cut[name].plan, store.done(cut[name].folder)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _checked_cells(asked: Asked) -> list[Cell]:
    """All there are to drive; UsageError for one that no engine could run."""
    cells = _cells(asked)
    for cell in cells:
        prepare.check_revert(asked.revert, cell.engine)
        check_scenarios(cell.scenarios, device=asked.device)
    return cells


def _shard_done(asked: Asked, night: Night, *, console: Console, json: str | None) -> Exit:
    """A shard is kept and not judged."""
    write_json(document.shard_document(night.plan, night.cells), json)
    say(console, f"shard {asked.shard}: {counted(len(night.cells), 'cell')} driven, and not judged alone")
    again = f"eaglecheck night {asked.nights} --nights STORE"
    say(console, f"judge the whole night, once all shards are here:  {again}")
    return Exit.PASS


def _by_now(driver: Driver, todo: NightPlan, root: Path, entries: Sequence[known.Entry]) -> dict[str, Any]:
    """The cells that are done, judged as what they are: a part of a night."""
    done = tuple(driver.results[key] for key in todo.mine if key in driver.results)
    if todo.shard[1] > 1:
        return document.shard_document(todo, done)
    part = Night(plan=todo, finished=_now(), cells=done)
    return document.document(judge(part, past=_past(root, part)[1], known=entries, today=today()))


def _left(folder: Path, todo: NightPlan, *, done: int, seeded: bool) -> str:
    """What an interrupted night leaves behind, and how to have the same one again."""
    again = typed_again(more=(*(() if seeded else ("--seed", str(todo.seed))), "--resume", todo.id))
    what = "night" if todo.shard[1] == 1 else "shard"
    return (
        f"the {what} {todo.id} never finished, {done} of {counted(len(todo.mine), 'cell')} driven: {folder} has no "
        f"{store.NIGHT}, and counts for nothing\n  drive the others:  {again}"
    )


def _past(root: Path, night: Night) -> tuple[list[Kept], list[Night]]:
    """(nights begun before this one, those of them that were judged)."""
    earlier = [one for one in store.nights(root) if one.plan.created < night.plan.created]
    return earlier, [one.night for one in earlier if one.night is not None and one.night.judged is not None]


def conclude(
    folder: Path,
    night: Night,
    *,
    root: Path,
    entries: Sequence[known.Entry],
    console: Console,
    json: str | None,
    also: Callable[[Judgement], None] = lambda _judged: None,
    keep: bool = True,
) -> Exit:
    """Judge a night, keep and print what was said. also: whatever else is written about it.

    keep: not one that never finished, which stays what it is: a plan, and no night.
    """
    earlier, past = _past(root, night)
    for one in earlier:
        if one.night is None:
            say(console, f"an earlier night never finished, and counts for nothing: {one.plan.id}", style="dim")
    judged = judge(_with_what_is_left(night, folder), past=past, known=entries, today=today())
    said = Judged(outcome=judged.outcome, reasons=judged.reasons)
    if keep:
        store.finish(folder, night.model_copy(update={"judged": said}))
    render_night(console, judged, folder=folder, kept=keep)
    write_json(document.document(judged), json)
    also(judged)
    return BY_OUTCOME[judged.outcome]


def _with_what_is_left(night: Night, folder: Path) -> Night:
    """The night without the names of reproducers that are gone: nobody can run those again."""

    def kept_in(cell: CellResult) -> CellResult:
        seen = [
            one
            if one.reproducer and (folder / one.reproducer).is_dir()
            else one.model_copy(update={"reproducer": None})
            for one in cell.findings
        ]
        return cell.model_copy(update={"findings": tuple(seen)})

    return night.model_copy(update={"cells": tuple(map(kept_in, night.cells))})


def today() -> date:
    return datetime.now(UTC).date()


def _cells(asked: Asked) -> list[Cell]:
    if asked.cases is None and asked.families is None:
        raise UsageError(
            "--nights needs --cases or --families\n"
            f"  allowed: --cases {ALL} or some of {', '.join(catalogue.names())}; "
            f"--families {ALL} or some of {', '.join(FAMILIES)}"
        )
    if asked.wanted.page_size is not None:
        raise UsageError("--page-size cannot be combined with --nights\n  allowed: --families paged")
    if asked.scenarios < 0 or not 0 < asked.seconds < math.inf:
        raise UsageError(
            f"--scenarios {asked.scenarios} --seconds {asked.seconds:g}: out of range\n"
            "  allowed: 0 scenarios (fixed ones only) or more, and more than 0 seconds"
        )
    named = [None] if asked.engines is None else prepare.split_list(asked.engines, option="engines")
    versions = [envs.resolve(name) for name in named]
    cells = plan(
        engines=versions,
        cases=[catalogue.load(name) for name in asked.chosen_cases],
        families=[FAMILIES[name] for name in asked.chosen_families],
        limits=Limits(scenarios=asked.scenarios, seconds=asked.seconds, seed=_seed(asked), mutants=asked.mutants),
        device=asked.device,
        wanted=asked.wanted,
        cards=_gpus(asked),
    )
    if not cells:
        options = {"--cases": asked.cases, "--families": asked.families}
        what = " and ".join(f"{name} {text}" for name, text in options.items() if text)
        raise UsageError(
            f"--engines {', '.join(versions)}: nothing of {what} runs there\n"
            "  allowed: another family or case, a newer release, or more GPUs for several ranks"
        )
    return cells


def _gpus(asked: Asked) -> int | None:
    """GPUs that this process may use; None on a CPU, where ranks need none."""
    if asked.device == "cpu":
        return None
    try:
        return len(gpus.visible(gpus.read_cards()))
    except gpus.CardError as error:
        raise UsageError(f"--device {asked.device}: {error}") from error


def _ahead(cells: Sequence[Cell]) -> str:
    """How many engines are booted for these cells, at least, and how long the generated ones may take."""
    boots = sum(len({one.boot_key() for one in cell.scenarios}) + (cell.draw is not None) for cell in cells)
    seconds = sum(cell.draw.seconds for cell in cells if cell.draw is not None)
    return prepare.ahead(boots, seconds)


def _not_planned(cells: Sequence[Cell], asked: Asked) -> list[str]:
    """What was asked for and cannot be had on a release, so that nothing is left out without a word."""
    left = left_out(
        engines=list(dict.fromkeys(cell.engine for cell in cells)),
        families=[FAMILIES[name] for name in asked.chosen_families],
        device=asked.device,
        wanted=asked.wanted,
        cards=_gpus(asked),
    )
    by_reason = dict[tuple[str, str, str], list[str]]()
    for one in left:
        by_reason.setdefault((one.family, one.engine, one.why), []).append(one.scenario)
    refused = [
        f"{counted(len(names), 'scenario')} of {family} on {engine} ({some(names, 3)}): {why}"
        for (family, engine, why), names in by_reason.items()
    ]
    there = {cell.name for cell in cells if cell.kind == "case"}
    cases = [
        f"case {name}, which needs {catalogue.load(name).scenario.engine.tp_size} GPUs"
        for name in asked.chosen_cases
        if name not in there
    ]
    return [*refused, *cases]


def _named(text: str | None, allowed: Sequence[str], *, what: str) -> list[str]:
    if text is None:
        return []
    if text == ALL:
        return list(allowed)
    names = prepare.split_list(text, option="cases" if what == "case" else "families")
    for name in names:
        if name not in allowed:
            raise UsageError(unknown(what, name, [*allowed, ALL]))
    return names


def _seed(asked: Asked) -> int:
    if asked.seed is not None:
        return asked.seed
    if asked.shard is not None:
        raise UsageError(
            "--shard needs --seed: every shard of a night must draw the same scenarios\n"
            "  for example:  --seed $GITHUB_RUN_ID"
        )
    return secrets.randbelow(SEEDS)


def _plan(asked: Asked, cells: Sequence[Cell], shard: tuple[int, int]) -> NightPlan:
    if shard[1] > len(cells):
        raise UsageError(
            f"--shard {asked.shard}: the night has {counted(len(cells), 'cell')}\n  allowed: at most that many shards"
        )
    drawn = [one.seed for cell in cells for one in (cell.draw, cell.mutants) if one is not None]
    return NightPlan(
        id=store.new_id(),
        created=_now(),
        device=asked.device,
        revert=asked.revert,
        seed=drawn[0] if drawn else asked.seed or 0,
        seconds=asked.seconds,
        scenarios=asked.scenarios,
        repeats=asked.repeats,
        shard=shard,
        planned=tuple(cell.key for cell in cells),
        costs=tuple(cell.cost for cell in cells),
        not_planned=tuple(_not_planned(cells, asked)),
        eaglecheck=own_version(),
        git_head=git_state()[0],
        source=source_digest(),
        host=platform.node(),
    )


def _share(todo: NightPlan) -> str:
    whole = counted(len(todo.planned), "cell")
    number, of = todo.shard
    return whole if of == 1 else f"shard {number} of {of}, {len(todo.mine)} of {whole}"


def _now() -> str:
    return datetime.now(UTC).isoformat()
