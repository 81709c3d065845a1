"""Drives the cells of a night on live engines and writes down what each showed.

It must not judge a night: it only counts. An engine that does not start, or an internal error, makes its scenarios
UNKNOWN; a full disk ends the night.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from harness.archive.faults import FULL, WriteError
from harness.checks.describe import describe
from harness.checks.ends import lost_by
from harness.checks.findings import Finding, by_signature, root_signatures
from harness.contract.known_issues import ASSUMED
from harness.contract.providers import JUDGED_BY, NOT_COMPARED
from harness.contract.scenario import Scenario
from harness.contract.types import Kind, Outcome, Verdict
from harness.driving.accept_lengths import AcceptLengths, total
from harness.driving.adapt import Wanted, adapted
from harness.driving.live import LiveEngines
from harness.driving.pool import beginning
from harness.driving.results import ScenarioResult
from harness.engines.errors import EngineError
from harness.night.cells import Cell
from harness.night.mutated import ask
from harness.night.records import CellResult, Seen
from harness.night.store import disk
from harness.search.shrink import size

#: Reasons that say what was not looked at, without making a verdict unknown.
NOT_A_CAUSE = ("not exercised", JUDGED_BY, NOT_COMPARED, ASSUMED)
#: Words and reasons kept of one cell.
MOST_REASONS, MOST_WORDS = 5, 2000

MakeEngines = Callable[[], LiveEngines]


@dataclass(slots=True, kw_only=True)
class Driver:
    """One shard of a night. folder: the night's own; repeats: how often a failing scenario is driven again."""

    make: MakeEngines
    folder: Path
    device: str = "cpu"
    revert: int | None = None
    repeats: int = 2
    wanted: Wanted = field(default_factory=Wanted)
    done: Callable[[CellResult], None] = lambda _result: None
    #: cells that come behind those it has, asked for before each
    more: Callable[[], Sequence[Cell]] = tuple
    _live: LiveEngines | None = None
    #: the cells behind the one that is driven
    _later: list[Cell] = field(default_factory=list)

    def run(self, cells: Sequence[Cell]) -> None:
        """`done` hears of each; driven release by release, so that engines are used again."""
        self._later = sorted(cells, key=_neighbours)
        try:
            while self._take():
                with disk(self.folder):
                    result = self._cell(self._later.pop(0))
                self.done(result)
        finally:
            self.close()

    def _take(self) -> bool:
        self._later += self.more()
        return bool(self._later)

    def close(self) -> None:
        if self._live is not None:
            self._live.end()
            self._live = None

    def _engines(self) -> LiveEngines:
        self._live = self._live or self.make()
        return self._live

    def _expect(self, live: LiveEngines, cell: Cell, scenarios: Sequence[Scenario]) -> None:
        """Boot engines of these scenarios behind the first and of the next cells beside the one that is driven now."""
        launches = []
        for asked, scenario in islice(self._upcoming(cell, scenarios), live.ahead + 1):
            live.assumed = asked.assumed_for(scenario)
            with suppress(Exception):  # it is raised again when the scenario's turn comes, and counted there
                launches.append(live.launch(scenario, engine=asked.engine, revert=self.revert))
        live.expect(launches[1:], now=launches[0] if launches else None)

    def _upcoming(self, cell: Cell, scenarios: Sequence[Scenario]) -> Iterator[tuple[Cell, Scenario]]:
        """The first of these scenarios, those after it that need an engine, and their cells."""
        yield from ((cell, one) for one in (scenarios[0], *beginning(scenarios)))
        for later in self._later:
            if later.scenarios and later.mutants is None:
                yield from ((later, one) for one in (later.scenarios[0], *beginning(later.scenarios)))

    def _cell(self, cell: Cell) -> CellResult:
        if cell.mutants is not None:
            self.close()  # nothing else is driven on engines that fork mutants
            live = self._engines()
            try:
                found = ask(cell, cell.mutants, live, folder=self.folder)
                return found.model_copy(update={"boots": live.boots, "waited": round(live.waited, 1)})
            finally:
                self.close()
        start = booted = time.monotonic()
        record, live = _CellRecord(cell=cell), self._engines()
        boots, waited = live.boots, live.waited
        scenarios = self._scenarios(cell)
        for number, scenario in enumerate(scenarios):
            if not number or scenarios[number - 1].updates:
                self._expect(live, cell, scenarios[number:])
            if cell.draw is not None and number and time.monotonic() - booted > cell.draw.seconds:
                record.left_out = len(scenarios) - number
                break
            self._scenario(record, scenario)
            booted = booted if number else time.monotonic()  # the limit is for scenarios, not for the start
        record.boots, record.waited = live.boots - boots, live.waited - waited
        return record.result(folder=self.folder, seconds=time.monotonic() - start)

    def _scenarios(self, cell: Cell) -> list[Scenario]:
        if cell.draw is None:
            return list(cell.scenarios)
        from cases.generation import generate  # Hypothesis

        made = generate(cell.draw.boot, count=cell.draw.count, seed=cell.draw.seed)
        return adapted(made, self.wanted, device=self.device)

    def _scenario(self, record: _CellRecord, scenario: Scenario) -> None:
        boot = scenario.boot_key()
        if boot in record.dead:
            record.unknown(record.dead[boot])
            return
        try:
            new = record.add(self._drive(record.cell, scenario))
            self._again(record, scenario, new)
        except EngineError as error:
            record.dead[boot] = str(error)
            record.unknown(str(error))
        except WriteError:
            raise
        except Exception as error:  # one cell's error must not cost the others their night, and is never a pass
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            record.unknown(f"internal error of eaglecheck in {scenario.name}: {type(error).__name__}: {error}")

    def _drive(self, cell: Cell, scenario: Scenario) -> ScenarioResult:
        live = self._engines()
        live.assumed = cell.assumed_for(scenario)
        return live(scenario, engine=cell.engine, revert=self.revert, fresh=True)

    def _again(self, record: _CellRecord, scenario: Scenario, signatures: Sequence[str]) -> None:
        """Drive a scenario again, at once and on the same engine, for what it was the first to show.

        A hang is not tried again: each costs its whole deadline.
        """
        asked = [signature for signature in signatures if not signature.startswith(f"{Kind.HANG}:")]
        for _ in range(self.repeats if asked else 0):
            try:
                outcome = self._drive(record.cell, scenario)
            except EngineError:  # it was driven once and is counted; the next scenario says why there is no engine
                break
            if any(map(lost_by, outcome.trace.events)):  # somebody ended it: neither shown nor not shown
                break
            seen = root_signatures(outcome.findings)
            for signature in asked:
                shown, tried = record.shown[signature]
                record.shown[signature] = (shown + (signature in seen), tried + 1)


def _neighbours(cell: Cell) -> tuple[str, str, str]:
    return (cell.engine, cell.boot_key, ",".join(cell.assumes))


@dataclass(slots=True, kw_only=True)
class _CellRecord:
    """What one cell has shown so far."""

    cell: Cell
    left_out: int = 0
    boots: int = 0
    waited: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    accept: AcceptLengths = field(default_factory=AcceptLengths)
    ties: int = 0
    choices: int = 0
    findings: list[tuple[Finding, ...]] = field(default_factory=list)
    smallest: dict[str, ScenarioResult] = field(default_factory=dict)
    #: signature -> (shown, tried) of the first scenario with it
    shown: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: boot keys whose engine did not start -> why
    dead: dict[str, str] = field(default_factory=dict)

    def unknown(self, why: str) -> None:
        self.outcomes.append(Outcome.UNKNOWN)
        self.reasons[why] += 1

    def add(self, outcome: ScenarioResult) -> list[str]:
        """Count one outcome; returns the signatures that were not seen in this cell before."""
        verdict = outcome.verdict
        self.outcomes.append(verdict.outcome)
        if verdict.outcome is Outcome.UNKNOWN:
            self.reasons.update(reason for reason in verdict.reasons if not reason.startswith(NOT_A_CAUSE))
        self.accepted.update(outcome.accepted)
        self.accept = total([self.accept, outcome.accept]) or self.accept
        self.ties += verdict.ties
        self.choices += verdict.compared.get("tokens", 0) + verdict.compared.get("proposals", 0)
        found = tuple(finding for finding in outcome.findings if finding.is_root)
        self.findings.append(found)
        new = []
        for finding in found:
            if finding.signature not in self.shown:
                self.shown[finding.signature] = (1, 1)
                new.append(finding.signature)
            held = self.smallest.get(finding.signature)
            if held is None or size(outcome.scenario) < size(held.scenario):
                self.smallest[finding.signature] = outcome
        return new

    def result(self, *, folder: Path, seconds: float) -> CellResult:
        return CellResult(
            **self.cell.facts(),
            verdict=Verdict.merge(self.outcomes),
            reasons=tuple(
                reason if count == 1 else f"{reason} (in {count} scenarios)"
                for reason, count in self.reasons.most_common(MOST_REASONS)
            ),
            scenarios=len(self.outcomes),
            failed=self.outcomes.count(Outcome.FAIL),
            unknown=self.outcomes.count(Outcome.UNKNOWN),
            left_out=self.left_out,
            findings=tuple(self._seen(folder)),
            accepted=dict(sorted(self.accepted.items())),
            accept=(self.accept.verifies, self.accept.expected, self.accept.observed),
            ties=self.ties,
            choices=self.choices,
            seconds=round(seconds, 1),
            boots=self.boots,
            waited=round(self.waited, 1),
        )

    def _seen(self, folder: Path) -> Iterator[Seen]:
        for shared in by_signature(self.findings):
            signature, outcome = shared.signature, self.smallest[shared.signature]
            first = next(one.first for one in outcome.findings if one.signature == signature)
            shown, tried = self.shown[signature]
            known = [f"  {one.line}" for one in outcome.known.get(signature, ())]
            yield Seen(
                signature=signature,
                scenarios=len(shared.members),
                divergences=shared.count,
                shown=shown,
                tried=tried,
                first="\n".join([describe(first, outcome.scenario)[:MOST_WORDS], *known]),
                reproducer=str(outcome.save_reproducer(folder).relative_to(folder)),
            )
