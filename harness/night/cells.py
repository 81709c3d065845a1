"""What a night is made of: cells of one release each, a corpus case, a family's fixed set, generated scenarios, or
mutants of the release's source.

Pure data; it must not draw scenarios and must not import torch, Hypothesis or sglang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from cases.boots import Boot
from cases.catalogue import Case
from cases.families import Family
from harness.contract.finding_pages import issues
from harness.contract.known_issues import ends_boot
from harness.contract.scenario import Scenario
from harness.contract.settings import EngineConfig
from harness.driving.adapt import NOTHING, Wanted, adapted
from harness.driving.refusals import refusal, undrawn
from harness.engines.envs import state

Kind = Literal["case", "fixed", "generated", "mutated"]

#: Seconds that shares of a night reckon with: a boot that is forked, one that is not, and a scenario.
FORKED, BOOTED, DRIVEN = 15.0, 60.0, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How many scenarios of a boot configuration are generated at most, from which seed, in how many seconds."""

    boot: Boot
    count: int
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutants:
    """How many lines of the release's source are written wrong, from which seed, in how many seconds.

    examples: generated scenarios that each gets which the fixed ones leave alive.
    """

    count: int
    seconds: float
    seed: int
    examples: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell. scenarios: fixed ones; draw: how others are generated. expected_kinds: what a case shows here.

    mutants: what is asked of its scenarios, where the cell is about them.
    """

    engine: str
    kind: Kind
    name: str
    scenarios: tuple[Scenario, ...] = ()
    draw: Draw | None = None
    mutants: Mutants | None = None
    expected: Literal["PASS", "FAIL", "unknown"] = "PASS"
    expected_kinds: tuple[str, ...] = ()
    #: ids of known issues that the case or the family's boots assume, each used where it can show
    assumes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.engine}/{self.kind}/{self.name}"

    @property
    def configs(self) -> tuple[EngineConfig, ...]:
        """The settings of its engines, those of the first one first."""
        return (self.draw.boot.engine,) if self.draw is not None else tuple(one.engine for one in self.scenarios)

    @property
    def boot_key(self) -> str:
        """Of its first engine."""
        return self.draw.boot.boot_key() if self.draw is not None else self.scenarios[0].boot_key()

    @property
    def cost(self) -> int:
        """About how many seconds it takes, for shares of a night that last alike."""
        if self.mutants is not None:
            return round(self.mutants.seconds)
        if self.draw is not None:
            return round(_boot_seconds(self.draw.boot.engine) + self.draw.seconds)
        boots = [*{one.boot_key(): one.engine for one in self.scenarios}.values()]
        boots += [one.engine for one in self.scenarios if one.updates]  # an engine with new weights is not used again
        return round(sum(map(_boot_seconds, boots)) + DRIVEN * len(self.scenarios))

    def facts(self) -> dict[str, Any]:
        """What its result says of it."""
        names = ("key", "engine", "kind", "name", "expected", "expected_kinds")
        return {name: getattr(self, name) for name in names}

    def assumed_for(self, scenario: Scenario) -> tuple[str, ...]:
        """What the reference takes for granted in one scenario."""
        known = issues()
        return tuple(
            name for name in self.assumes if known[name].shows_in(scenario.spec, scenario.engine, release=self.engine)
        )


def _boot_seconds(engine: EngineConfig) -> float:
    """DP ranks of some releases are not forked, nor a pair's hosts."""
    return BOOTED if engine.dp_size > 1 or engine.disaggregation else FORKED


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A scenario that is not driven on a release, and why; the words of a refusal, or our own."""

    engine: str
    family: str
    scenario: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one family's generated scenarios may cost on one release, shared by its boot configurations."""

    scenarios: int
    seconds: float
    seed: int
    mutants: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a night is driven on. wanted: in place of scenarios' settings; cards: one a rank, None: ranks need none."""

    device: str = "cpu"
    wanted: Wanted = NOTHING
    cards: int | None = None

    def takes(self, engine: EngineConfig) -> bool:
        """Whether there are cards for all ranks."""
        return self.cards is None or engine.tp_size <= self.cards


def plan(
    *, engines: Sequence[str], cases: Sequence[Case], families: Sequence[Family], limits: Limits, place: Place = Place()
) -> tuple[list[Cell], list[LeftOut]]:
    """Every cell, release by release; and the scenarios that a release refuses, is too old for, or lacks cards for."""
    cells, left = list[Cell](), list[LeftOut]()
    for engine in engines:
        cells += [_case(case, engine, place) for case in cases if place.takes(case.scenario.engine)]
        for family in families:
            fixed, others = _sorted_out(family, engine, place)
            cells += _family(family, fixed, engine, limits, place)
            left += others
    return cells, left


def _case(case: Case, engine: str, place: Place) -> Cell:
    expected = case.expected(release=engine, revert=None, device=place.device)
    return Cell(
        engine=engine,
        kind="case",
        name=case.id,
        scenarios=tuple(adapted([case.scenario], place.wanted, device=place.device)),
        expected=expected,
        expected_kinds=() if expected == "PASS" else case.kinds,
        assumes=case.assumes,
    )


def _family(
    family: Family, fixed: dict[str, list[Scenario]], engine: str, limits: Limits, place: Place
) -> Iterator[Cell]:
    assumes = tuple(sorted({name for boot in family.boots for name in boot.assumes}))
    for name, scenarios in fixed.items():
        yield Cell(
            engine=engine, kind="fixed", name=f"{family.name}/{name}", scenarios=tuple(scenarios), assumes=assumes
        )
    if fixed and limits.mutants and place.device == "cpu":  # forked processes: a CUDA context does not survive that
        mutants = Mutants(count=limits.mutants, seconds=limits.seconds, seed=limits.seed)
        every = tuple(one for scenarios in fixed.values() for one in scenarios)
        yield Cell(engine=engine, kind="mutated", name=family.name, scenarios=every, mutants=mutants)
    if limits.scenarios:
        boots = [boot for boot in family.boots if boot.planned_on(engine) and place.takes(boot.engine)]
        for boot in boots:
            draw = Draw(
                boot=boot,
                count=-(-limits.scenarios // len(boots)),
                seconds=limits.seconds / len(boots),
                seed=limits.seed,
            )
            yield Cell(engine=engine, kind="generated", name=f"{family.name}/{boot.name}", draw=draw, assumes=assumes)


def unplanned(boot: Boot) -> str:
    """Why nights leave it out on a release before its first, where `eaglecheck run` would drive it."""
    return f"not in nights before {boot.since}, though run drives it ({boot.before})"


def _sorted_out(family: Family, engine: str, place: Place) -> tuple[dict[str, list[Scenario]], list[LeftOut]]:
    """Of a family's fixed set what is driven on a release, by boot configuration, and what is not.

    A boot configuration that generation has no turn on is named after its first scenario.
    """
    boots = {boot.boot_key(): boot for boot in family.boots}
    oldest = min(family.boots, key=lambda boot: Version(boot.since))
    env, names = state(engine), dict[str, str]()
    driven, left = dict[str, list[Scenario]](), list[LeftOut]()
    for asked in family.scenarios:
        key = asked.boot_key()
        boot = boots.get(key)
        name = names.setdefault(key, asked.name if boot is None else boot.name)
        (one,) = adapted([asked], place.wanted, device=place.device)
        why = refusal(one, version=engine, device=place.device) or undrawn(one, env, device=place.device)
        if not why and (known := ends_boot(one, release=engine, device=place.device)):
            why = f"{known.id} ends the engine while it boots: {known.title}"
        if not why and not place.takes(one.engine):
            why = f"it needs {one.engine.tp_size} GPUs, of {place.cards} that are there"
        if not why and not (boot or oldest).planned_on(engine):
            why = unplanned(boot or oldest)
        if why:
            left.append(LeftOut(engine=engine, family=family.name, scenario=one.name, why=why.partition("\n")[0]))
        else:
            driven.setdefault(name, []).append(one)
    return driven, left
