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
from harness.driving.adapt import Wanted, adapted
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


def plan(
    *,
    engines: Sequence[str],
    cases: Sequence[Case],
    families: Sequence[Family],
    limits: Limits,
    device: str = "cpu",
    wanted: Wanted | None = None,
    cards: int | None = None,
) -> list[Cell]:
    """Every cell, release by release. Scenarios that a release refuses or is too old for are not in it.

    cards: GPUs there are, one a rank; scenarios of more ranks are not in it either. None: ranks need none.
    """
    wanted = wanted or Wanted()
    return [
        cell
        for engine in engines
        for cell in (
            *(
                _case(case, engine, device=device, wanted=wanted)
                for case in cases
                if _enough(case.scenario.engine, cards)
            ),
            *(
                cell
                for family in families
                for cell in _family(family, engine, limits, device=device, wanted=wanted, cards=cards)
            ),
        )
    ]


def _case(case: Case, engine: str, *, device: str, wanted: Wanted) -> Cell:
    expected = case.expected(release=engine, revert=None, device=device)
    return Cell(
        engine=engine,
        kind="case",
        name=case.id,
        scenarios=tuple(adapted([case.scenario], wanted, device=device)),
        expected=expected,
        expected_kinds=() if expected == "PASS" else case.kinds,
        assumes=case.assumes,
    )


def left_out(
    *,
    engines: Sequence[str],
    families: Sequence[Family],
    device: str = "cpu",
    wanted: Wanted | None = None,
    cards: int | None = None,
) -> list[LeftOut]:
    """The scenarios of these families that `plan` has no cell for, in order."""
    return [
        LeftOut(engine=engine, family=family.name, scenario=one.name, why=why)
        for engine in engines
        for family in families
        for _, one, why in _sorted_out(family, engine, device=device, wanted=wanted or Wanted(), cards=cards)
        if why
    ]


def _family(
    family: Family, engine: str, limits: Limits, *, device: str, wanted: Wanted, cards: int | None
) -> Iterator[Cell]:
    fixed = dict[str, list[Scenario]]()
    for name, one, why in _sorted_out(family, engine, device=device, wanted=wanted, cards=cards):
        if not why:
            fixed.setdefault(name, []).append(one)
    assumes = tuple(sorted({name for boot in family.boots for name in boot.assumes}))
    for name, scenarios in fixed.items():
        yield Cell(
            engine=engine, kind="fixed", name=f"{family.name}/{name}", scenarios=tuple(scenarios), assumes=assumes
        )
    if fixed and limits.mutants and device == "cpu":  # forked processes: a CUDA context does not survive that
        mutants = Mutants(count=limits.mutants, seconds=limits.seconds, seed=limits.seed)
        every = tuple(one for scenarios in fixed.values() for one in scenarios)
        yield Cell(engine=engine, kind="mutated", name=family.name, scenarios=every, mutants=mutants)
    if limits.scenarios:
        boots = [boot for boot in family.boots if boot.works_on(engine) and _enough(boot.engine, cards)]
        for boot in boots:
            draw = Draw(
                boot=boot,
                count=-(-limits.scenarios // len(boots)),
                seconds=limits.seconds / len(boots),
                seed=limits.seed,
            )
            yield Cell(engine=engine, kind="generated", name=f"{family.name}/{boot.name}", draw=draw, assumes=assumes)


def _sorted_out(
    family: Family, engine: str, *, device: str, wanted: Wanted, cards: int | None
) -> list[tuple[str, Scenario, str]]:
    """(boot configuration, scenario, why it is not driven on a release, in a line, or nothing) of a family's fixed set.

    A boot configuration that generation has no turn on is named after its first scenario.
    """
    boots = {boot.boot_key(): boot for boot in family.boots}
    oldest = min((boot.since for boot in family.boots), key=Version)
    env, names, found = state(engine), dict[str, str](), list[tuple[str, Scenario, str]]()
    for asked in family.scenarios:
        key = asked.boot_key()
        boot = boots.get(key)
        name = names.setdefault(key, asked.name if boot is None else boot.name)
        since = oldest if boot is None else boot.since
        if Version(engine) < Version(since):
            found.append((name, asked, f"driven from {since} on"))
            continue
        (one,) = adapted([asked], wanted, device=device)
        why = refusal(one, version=engine, device=device) or undrawn(one, env, device=device)
        if not why and (known := ends_boot(one, release=engine, device=device)):
            why = f"{known.id} ends the engine while it boots: {known.title}"
        if not why and not _enough(one.engine, cards):
            why = f"it needs {one.engine.tp_size} GPUs, of {cards} that are there"
        found.append((name, one, why.partition("\n")[0]))
    return found


def _enough(engine: EngineConfig, cards: int | None) -> bool:
    return cards is None or engine.tp_size <= cards
