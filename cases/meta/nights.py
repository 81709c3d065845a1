"""Hand-made nights, for tests of everything that is judged, printed or written about one. No engine, no clock."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from cases.known import Entry
from cases.meta import results
from harness.checks import judge as check
from harness.contract.scenario import Scenario
from harness.contract.types import Outcome
from harness.driving.plan import Setup
from harness.driving.results import ScenarioResult
from harness.night.judge import judge
from harness.night.records import CellResult, Judged, Night, NightPlan, Seen

TODAY = datetime.date(2026, 11, 28)
AHEAD = "POSITION:positions:DRAFT:one-ahead"
STOP = "TOKEN:finish:ACCEPT:ran-past-stop"
PLACE = (
    "draft position differs: request a on DP rank 0, committed length 7, round 1, draft step 0 of 2\n"
    "  engine 8, expected 7 (one ahead)"
)


def seen(signature: str = AHEAD, *, shown: int = 3, tried: int = 3, **changes: Any) -> Seen:
    values = {"scenarios": 1, "divergences": 8, "first": PLACE, "reproducer": "reproducers/pr25015-0123456789ab-0.5.13"}
    return Seen(signature=signature, shown=shown, tried=tried, **{**values, **changes})


def cell(
    name: str = "eagle", *findings: Seen, engine: str = "0.5.13", kind: str = "fixed", **changes: Any
) -> CellResult:
    """A cell that passes, or fails with these findings."""
    values: dict[str, Any] = {
        "key": f"{engine}/{kind}/{name}",
        "engine": engine,
        "kind": kind,
        "name": name,
        "expected": "PASS",
        "expected_kinds": (),
        "verdict": Outcome.FAIL if findings else Outcome.PASS,
        "reasons": (),
        "scenarios": 10,
        "failed": len(findings),
        "unknown": 0,
        "left_out": 0,
        "findings": findings,
        "accepted": {1: 10, 2: 6, 4: 4},
        "ties": 1,
        "choices": 2000,
        "seconds": 12.3,
    }
    return CellResult.model_validate({**values, **changes})


def night(
    *cells: CellResult, day: int = 28, planned: Sequence[str] | None = None, faults: Sequence[str] = (), **plan: Any
) -> Night:
    """A finished night of that day, not judged yet."""
    values: dict[str, Any] = {
        "id": f"202611{day:02}-020000-ab{day:02}",
        "created": f"2026-11-{day:02}T02:00:00+00:00",
        "device": "cpu",
        "revert": None,
        "seed": 7,
        "seconds": 600.0,
        "scenarios": 120,
        "repeats": 2,
        "shard": (1, 1),
        "planned": tuple(planned if planned is not None else [one.key for one in cells]),
        "eaglecheck": "0.1.0",
        "git_head": "0" * 40,
        "source": "0" * 64,
        "host": "runner-3",
    }
    made = NightPlan.model_validate({**values, **plan})
    return Night(plan=made, finished=f"2026-11-{day:02}T03:00:00+00:00", cells=cells, faults=tuple(faults))


def store_of_twelve() -> list[Night]:
    """Twelve nights: one red, two values that move in the last, one cell that only the last has."""

    def of(day: int) -> Night:
        last, bad = day == 28, day == 21
        eagle = cell(
            "eagle",
            *([seen()] if bad else []),
            accepted={1: 40 + 3 * (day % 4), 2: 25, 4: 35 - 2 * (day % 3)} if not last else {1: 90, 2: 10, 4: 2},
            ties=day % 5,
        )
        tree = cell("eagle/plain", kind="generated", accepted={1: 10 + day % 2, 3: 9}, ties=60 if last else 1)
        still = cell("pr25015", kind="case", engine="0.5.23", accepted={1: 8}, ties=0, choices=90)
        only = [cell("tree", engine="0.5.23", ties=2)] if last else []
        return night(eagle, tree, still, *only, day=day)

    found: list[Night] = []
    for day in range(17, 29):
        found.append(over(of(day), *found))
    return found


def over(one: Night, *past: Night, known: Sequence[Entry] = ()) -> Night:
    """The night with its judgement in it, as a store keeps it."""
    found = judge(one, past=past, known=known, today=TODAY)
    return one.model_copy(update={"judged": Judged(outcome=found.outcome, reasons=found.reasons)})


def entry(*signatures: str, **changes: Any) -> Entry:
    values: dict[str, Any] = {
        "issue": "F-004",
        "what": "a stop token that is ignored",
        "signatures": signatures or (STOP,),
        "engines": ("0.5.13",),
        "cells": ("fixed/*",),
        "expires": datetime.date(2027, 5, 31),
    }
    return Entry.model_validate({**values, **changes})


class ByHand:
    """Engines that answer in order, the last answer again and again: a way to break a trace, or an error to raise."""

    def __init__(self, *answers: results.Break | Exception) -> None:
        self.answers, self.driven, self.closed = list(answers), list[str](), 0
        self.boots, self.waited, self.ahead, self.expected = 0, 0.0, 1, list[Any]()

    def launch(self, scenario: Scenario, *, engine: str, revert: int | None) -> tuple[str, str]:
        return (engine, scenario.name)

    def expect(self, launches: list[Any], *, now: bool) -> None:
        self.expected += launches

    def __call__(self, scenario: Scenario, *, engine: str, revert: int | None, fresh: bool) -> ScenarioResult:
        assert fresh, "a remembered run would make every repeat agree"
        self.driven.append(scenario.name)
        self.boots, self.waited = self.boots + 1, self.waited + 2.5
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        trace, reference = results.traces(scenario, answer)
        verdict, divergences = check(scenario, trace, reference)
        setup = Setup(release=engine, revert=revert)
        return ScenarioResult.of(scenario, trace, reference, verdict, divergences, setup=setup)

    def end(self) -> None:
        self.closed += 1
