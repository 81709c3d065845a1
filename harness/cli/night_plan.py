"""What a night is asked for: what was typed, and the cells and the plan that come of it. It must not drive anything."""

from __future__ import annotations

import math
import platform
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cases import catalogue
from cases.families import FAMILIES
from harness.both_sides import gpus
from harness.cli import prepare
from harness.cli.night import now
from harness.cli.scenario_checks import check_scenarios
from harness.contract.usage import UsageError, unknown
from harness.contract.words import counted, some
from harness.driving.adapt import Wanted, adapted
from harness.driving.own_source import git_state, own_version, source_digest
from harness.engines import envs
from harness.night import store
from harness.night.cells import Cell, LeftOut, Limits, Place, plan
from harness.night.records import NightPlan

ALL = "all"
#: Seeds are short enough to be typed again.
SEEDS = 10**8
#: Of a plan, what one sitting has and another has not.
OF_A_SITTING = {"id", "created", "host", "jobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed. shard None: the whole night. seconds, scenarios: each family's limits on one release.

    repeats: how often a failure is driven again. resume: the id of a night in `nights` that was cut off.
    """

    nights: Path
    engines: str | None = None
    cases: str | None = None
    families: str | None = None
    shard: str | None = None
    jobs: int = 1
    seconds: float = 600.0
    scenarios: int = 120
    mutants: int = 0
    seed: int | None = None
    repeats: int = 2
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


def checked_cells(asked: Asked) -> tuple[list[Cell], list[LeftOut]]:
    """All there are to drive, and what is left out; UsageError for a scenario that no engine could run."""
    if asked.cases is None and asked.families is None:
        raise UsageError(
            "--nights needs --cases or --families\n"
            f"  allowed: --cases {ALL} or some of {', '.join(catalogue.names())}; "
            f"--families {ALL} or some of {', '.join(FAMILIES)}"
        )
    if asked.wanted.page_size is not None:
        raise UsageError("--page-size cannot be combined with --nights\n  allowed: --families paged")
    if asked.scenarios < 0:
        raise UsageError(f"--scenarios {asked.scenarios}: out of range\n  allowed: 0 (fixed ones only) or more")
    if not 0 < asked.seconds < math.inf:
        raise UsageError(f"--seconds {asked.seconds:g}: out of range\n  allowed: more than 0")
    named = [None] if asked.engines is None else prepare.split_list(asked.engines, option="engines")
    versions = [envs.resolve(name) for name in named]
    for version in versions:
        prepare.check_revert(asked.revert, version)
    cases = [catalogue.load(name) for name in asked.chosen_cases]
    families = [FAMILIES[name] for name in asked.chosen_families]
    chosen = [case.scenario for case in cases] + [one for family in families for one in family.scenarios]
    check_scenarios(adapted(chosen, asked.wanted, device=asked.device), device=asked.device)
    cells, left = plan(
        engines=versions,
        cases=cases,
        families=families,
        limits=Limits(scenarios=asked.scenarios, seconds=asked.seconds, seed=_seed(asked), mutants=asked.mutants),
        place=_place(asked),
    )
    if not cells:
        options = {"--cases": asked.cases, "--families": asked.families}
        what = " and ".join(f"{name} {text}" for name, text in options.items() if text)
        why = dict.fromkeys(one.why for one in left)
        raise UsageError(
            f"--engines {', '.join(versions)}: nothing of {what} is planned there\n  "
            + (some([*why], 3) or "allowed: another case, or more GPUs for several ranks")
        )
    return cells, left


def _place(asked: Asked) -> Place:
    """With the GPUs that this process may use; on a CPU ranks need none."""
    try:
        cards = None if asked.device == "cpu" else len(gpus.visible(gpus.read_cards()))
    except gpus.CardError as error:
        raise UsageError(f"--device {asked.device}: {error}") from error
    return Place(device=asked.device, wanted=asked.wanted, cards=cards)


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


def planned(asked: Asked, cells: Sequence[Cell], left: Sequence[LeftOut], shard: tuple[int, int]) -> NightPlan:
    if shard[1] > len(cells):
        raise UsageError(
            f"--shard {asked.shard}: the night has {counted(len(cells), 'cell')}\n  allowed: at most that many shards"
        )
    drawn = [one.seed for cell in cells for one in (cell.draw, cell.mutants) if one is not None]
    return NightPlan(
        id=store.new_id(),
        created=now(),
        device=asked.device,
        revert=asked.revert,
        settings=asked.wanted.changes(),
        seed=drawn[0] if drawn else asked.seed or 0,
        seconds=asked.seconds,
        scenarios=asked.scenarios,
        repeats=asked.repeats,
        shard=shard,
        jobs=asked.jobs,
        planned=tuple(cell.key for cell in cells),
        costs=tuple(cell.cost for cell in cells),
        not_planned=tuple(_not_planned(cells, left, asked)),
        eaglecheck=own_version(),
        git_head=git_state()[0],
        source=source_digest(),
        host=platform.node(),
    )


def _not_planned(cells: Sequence[Cell], left: Sequence[LeftOut], asked: Asked) -> list[str]:
    """What was asked for and cannot be had on a release, so that nothing is left out without a word."""
    by_reason = dict[str, dict[str, Counter[str]]]()
    for one in left:
        by_reason.setdefault(one.why, {}).setdefault(one.engine, Counter())[one.family] += 1
    refused = [f"{why}: {_scenarios(found)}" for why, found in by_reason.items()]
    there = {cell.name for cell in cells if cell.kind == "case"}
    cases = [
        f"case {name}, which needs {catalogue.load(name).scenario.engine.tp_size} GPUs"
        for name in asked.chosen_cases
        if name not in there
    ]
    return [*refused, *cases]


def _scenarios(found: dict[str, Counter[str]]) -> str:
    """'43 scenarios (0.5.13: dp 18, tp 25)'. found: release -> family -> how many."""
    each = {engine: ", ".join(f"{name} {count}" for name, count in of.items()) for engine, of in found.items()}
    every = counted(sum(of.total() for of in found.values()), "scenario")
    return f"{every} ({'; '.join(f'{engine}: {families}' for engine, families in each.items())})"


def resumed(root: Path, name: str, todo: NightPlan) -> NightPlan:
    """A night that was cut off; UsageError unless the same code was asked for the same cells."""
    cut = {one.plan.id: one for one in store.nights(root) if one.night is None}
    if name not in cut:
        raise UsageError(unknown("unfinished night", name, [*cut]) + f"\n  they are in --nights {root}")
    then, now = cut[name].plan.model_dump(exclude=OF_A_SITTING), todo.model_dump(exclude=OF_A_SITTING)
    for key in (key for key in then if then[key] != now[key]):
        raise UsageError(
            f"--resume {name}: {key} was another when that night began\n  {_other(then[key], now[key])}\n"
            "  a night is of one plan and one state of the code; without --resume another begins"
        )
    return cut[name].plan.model_copy(update={"jobs": todo.jobs})


def _other(then: object, now: object) -> str:
    """'then A, now B'; of several things those that are there once."""
    if isinstance(then, tuple) and isinstance(now, tuple):
        then, now = [one for one in then if one not in now], [one for one in now if one not in then]
        then, now = (some([str(one) for one in each], 3) or "no others" for each in (then, now))
    return f"then {then}, now {now}"


def ahead(cells: Sequence[Cell], *, jobs: int) -> str:
    """How many engines are booted for these cells, at least, and how long the generated ones may take."""
    boots = sum(len({one.boot_key() for one in cell.scenarios}) + (cell.draw is not None) for cell in cells)
    seconds = sum(cell.draw.seconds for cell in cells if cell.draw is not None)
    return prepare.ahead(boots, seconds, jobs=jobs)


def share_of(todo: NightPlan) -> str:
    whole = counted(len(todo.planned), "cell")
    number, of = todo.shard
    share = whole if of == 1 else f"shard {number} of {of}, {len(todo.mine)} of {whole}"
    return share if todo.jobs == 1 else f"{share}, in {todo.jobs} processes"
