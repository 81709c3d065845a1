"""The mutants of a night: some lines of a release's source written wrong, and which of them nothing noticed.

A survivor that nobody explained is a finding of the night like any other, known or new. It must not judge a night.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.contract.types import Outcome
from harness.driving.live import LiveEngines
from harness.engines.errors import EngineError
from harness.night.cells import Cell, Mutants
from harness.night.records import CellResult, Seen
from harness.search.executed import Followed, follow
from harness.search.faults import draw
from harness.search.mutant_results import Campaign, Result, explanations
from harness.search.mutate import MutantRunner
from harness.search.mutate_report import Line, Report, document
from harness.search.tasks import Place, Waiting, rounds
from harness.search.text import line_of


def ask(cell: Cell, wanted: Mutants, engines: LiveEngines, *, folder: Path) -> CellResult:
    """What the cell's mutants showed; those that the time does not last for are left out, and said."""
    start = time.monotonic()
    engines.copies = True
    package = engines.environment(cell.engine).package
    if package is None:
        return _result(cell, None, start=start, why=f"the source of SGLang {cell.engine} is not on this disk")
    try:
        followed = [follow(engines, one, cell.name) for one in cell.scenarios]
    except EngineError as error:
        return _result(cell, None, start=start, why=str(error))
    every = Followed.of(followed)
    campaign = Campaign(
        engine=cell.engine,
        device="cpu",
        families=(cell.name,),
        seed=wanted.seed,
        examples=wanted.examples,
        left_out=tuple(f"{one.scenario.name}: {one.why}" for one in every.sounds if one.why),
        mutants=tuple(draw(package, every.ran, count=wanted.count, seed=wanted.seed)),
    )
    runner = MutantRunner(
        engines=engines,
        package=package,
        folder=folder / "mutated" / str(os.getpid()),  # another process may be given the same line
        sounds=every.sounds,
        release=cell.engine,
    )
    results = dict[str, Result]()
    place = Place(release=cell.engine)
    tasks = rounds(campaign.mutants, every.sounds, place=place, examples=wanted.examples, seed=wanted.seed)
    waiting = Waiting(rounds=list(tasks), known=results)
    while time.monotonic() - start < wanted.seconds and (batch := waiting.take()):
        waiting.give(batch, runner.ask(batch))
    why = "" if results else _nothing_asked(campaign, wanted.seconds)
    return _result(cell, Report.of(campaign, results, explanations()), start=start, why=why)


def _nothing_asked(campaign: Campaign, seconds: float) -> str:
    if not campaign.mutants:
        return "nothing that its scenarios execute can be mutated"
    return f"--seconds {seconds:g} were over once its scenarios had been followed, before any mutant: allow more"


def _result(cell: Cell, board: Report | None, *, start: float, why: str = "") -> CellResult:
    """A mutant counts as a scenario: a survivor has failed, and one that is neither killed nor survived is unknown."""
    lines = () if board is None else board.lines
    left = [line for line in lines if line.stands == "survived" and line.explained is None]
    unknown = [line for line in lines if line.stands in ("unknown", "error", "not run")]
    reasons = [f"{line.mutant.id}: {line.result.why}" for line in unknown]
    outcome = Outcome.FAIL if left else Outcome.UNKNOWN if unknown or why or not lines else Outcome.PASS
    return CellResult(
        **cell.facts(),
        verdict=outcome,
        reasons=tuple([why] if why else reasons[:5]),
        scenarios=len(lines) or 1,
        failed=len(left),
        unknown=len(unknown) if lines else 1,
        left_out=0 if board is None else max(0, len(board.campaign.mutants) - (len(lines) or 1)),
        findings=tuple(_seen(line) for line in left),
        accepted={},
        ties=0,
        choices=0,
        seconds=round(time.monotonic() - start, 1),
        board=None if board is None else document(board),
    )


def _seen(line: Line) -> Seen:
    """A survivor, named by what was changed and not by the line, which moves with the release."""
    mutant = line.mutant
    return Seen(
        signature=f"SURVIVED:{mutant.file}:{mutant.function}:{mutant.operator}",
        scenarios=1,
        divergences=1,
        shown=1,
        tried=1,
        first=f"{mutant.where} {mutant.function}: {mutant.what}\n{line_of(mutant, line.result)}",
        reproducer=None,
    )
