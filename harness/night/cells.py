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
from harness.contract.known_issues import issues
from harness.contract.scenario import Scenario
from harness.driving.adapt import Wanted, adapted, refusal

Kind = Literal["case", "fixed", "generated", "mutated"]


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
    #: scenarios of the family that this release is too old for, or refuses, or that need more GPUs
    refused: int = 0

    @property
    def key(self) -> str:
        return f"{self.engine}/{self.kind}/{self.name}"

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
    wanted, most = wanted or Wanted(), 10**6 if cards is None else cards
    return [
        cell
        for engine in engines
        for cell in (
            *(
                _case(case, engine, device=device, wanted=wanted)
                for case in cases
                if case.scenario.engine.tp_size <= most
            ),
            *(
                cell
                for family in families
                for cell in _family(family, engine, limits, device=device, wanted=wanted, most=most)
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


def _family(family: Family, engine: str, limits: Limits, *, device: str, wanted: Wanted, most: int) -> Iterator[Cell]:
    boots = [boot for boot in family.boots if boot.works_on(engine) and boot.engine.tp_size <= most]
    since = {boot.boot_key(): boot.since for boot in family.boots}
    oldest = min((boot.since for boot in family.boots), key=Version)
    assumes = tuple(sorted({name for boot in family.boots for name in boot.assumes}))
    old_enough = [one for one in family.scenarios if Version(engine) >= Version(since.get(one.boot_key(), oldest))]
    fixed = [
        one
        for one in adapted(old_enough, wanted, device=device)
        if not refusal(one, version=engine, device=device) and one.engine.tp_size <= most
    ]
    if fixed:
        yield Cell(
            engine=engine,
            kind="fixed",
            name=family.name,
            scenarios=tuple(fixed),
            assumes=assumes,
            refused=len(family.scenarios) - len(fixed),
        )
    if fixed and limits.mutants and device == "cpu":  # forked processes: a CUDA context does not survive that
        mutants = Mutants(count=limits.mutants, seconds=limits.seconds, seed=limits.seed)
        yield Cell(engine=engine, kind="mutated", name=family.name, scenarios=tuple(fixed), mutants=mutants)
    if limits.scenarios:
        for boot in boots:
            draw = Draw(
                boot=boot,
                count=-(-limits.scenarios // len(boots)),
                seconds=limits.seconds / len(boots),
                seed=limits.seed,
            )
            yield Cell(engine=engine, kind="generated", name=f"{family.name}/{boot.name}", draw=draw, assumes=assumes)
