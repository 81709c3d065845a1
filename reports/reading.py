"""Reads a stored run into results and frames in one pass.

It must not judge again, and must not print.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.archive.again import short
from harness.archive.store import StoredScenario, reproducer_of
from harness.driving.plan import Setup
from harness.driving.results import Cost, RunResult, ScenarioResult
from reports.frames import Frames, case_frames
from reports.source import Source, open_source, verdict_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """results as a run ends with them, and the frames of each scenario, in the same order."""

    source: Source
    result: RunResult
    frames: tuple[Frames, ...]


def read_report(run: Path) -> Report:
    """Everything stored about a run, a scenario or a reproducer; StoreError or TraceError where it is unfit."""
    source = open_source(run)
    results, frames = [], []
    for case in source.cases():
        results.append(_result(case, source))
        frames.append(case_frames(case, run=source.name))
    result = RunResult(
        folder=source.folder,
        engine=source.release,
        device=source.device,
        revert=source.engine.get("revert"),
        header=source.engine,
        results=tuple(results),
        verdict=source.verdict,
        cost=Cost(),
    )
    return Report(source=source, result=result, frames=tuple(frames))


def _result(case: StoredScenario, source: Source) -> ScenarioResult:
    setup = Setup.told({**source.engine, "release": source.release, "device": source.device})
    places = {"folder": short(case.folder), "reproducer": reproducer_of(case.folder)}
    found = ScenarioResult.of(
        case.scenario, case.engine, case.reference, verdict_of(case), case.findings, setup=setup, **places
    )
    return found.without_rows()
