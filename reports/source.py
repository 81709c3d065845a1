"""Opens the source of a report: a run folder, complete or not, a scenario's or a reproducer's folder.

It must not judge again: verdicts and findings are the ones the run ended with. `eaglecheck recheck` judges. Only what a
reproducer compared and reached, which it does not keep, is counted from its traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.archive.again import short
from harness.archive.records import RunManifest, ScenarioVerdict
from harness.archive.run_folders import MANIFEST, is_case
from harness.archive.store import RunReader, StoredScenario, read_case, read_verdict
from harness.archive.trace_io import header_of, trace_files
from harness.checks.findings import group, kinds
from harness.checks.judge import judge
from harness.contract.merge import merge
from harness.contract.types import Outcome, Verdict
from harness.contract.words import counted
from harness.driving.own_pair import described


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One run. missing: why it is not a whole run, or empty; verdict is then UNKNOWN or what was found so far.

    folders: the judged scenarios in it; engine: what the manifest, else the first handshake, says of the engine.
    """

    folder: Path
    name: str
    manifest: RunManifest | None
    engine: dict[str, Any]
    verdict: Verdict
    folders: Sequence[Path]
    missing: str = ""

    @property
    def release(self) -> str:
        return str(self.engine.get("release") or "unknown")

    @property
    def device(self) -> str:
        return str(self.engine.get("device") or "unknown")

    @property
    def pair(self) -> dict[str, str]:
        """What `target` and `draft` are, a line each, where the user named them; empty for pairs of ours."""
        facts = None if self.manifest is None else self.manifest.known_pair()
        lines = [] if facts is None else described(facts).splitlines()[1:]
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}

    def cases(self) -> Iterator[StoredScenario]:
        """Every judged scenario, one at a time: traces can be large."""
        return (read_case(folder) for folder in self.folders)


def open_source(path: Path) -> Source:
    """The run, scenario or reproducer in `path`; StoreError where it is none."""
    return _case(path) if is_case(path) else _run(path)


def _run(path: Path) -> Source:
    reader = RunReader.open(path, allow_incomplete=True)
    found = reader.judged()
    missing = ""
    if reader.verdict is None:
        missing = f"the run is {reader.unfinished}; {counted(len(found), 'scenario')} judged before that"
    elif gone := reader.gone(found):
        missing = f"the run is not whole: {gone} was judged in it and is gone"
    whole = reader.verdict is not None and not missing
    return Source(
        folder=short(reader.folder),
        name=reader.folder.name,
        manifest=reader.manifest,
        engine=_described(reader.manifest.engine.known(), list(found)),
        verdict=reader.verdict.verdict()
        if whole and reader.verdict is not None
        else merge([*(one.verdict() for one in found.values()), Verdict(outcome=Outcome.UNKNOWN, reasons=(missing,))]),
        folders=list(found),
        missing=missing,
    )


def _case(path: Path) -> Source:
    folder = path.resolve()
    found = read_verdict(folder, ScenarioVerdict)
    inside = (folder.parent / MANIFEST).exists()
    manifest = RunReader.open(folder.parent, allow_incomplete=True).manifest if inside else None
    case = read_case(folder)
    missing = "" if found is not None else "a reproducer keeps no verdict: the findings are those it was made from"
    return Source(
        folder=short(folder),
        name=folder.name,
        manifest=manifest,
        engine=_described({} if manifest is None else manifest.engine.known(), [folder]),
        verdict=verdict_of(case),
        folders=[folder],
        missing=missing,
    )


def verdict_of(case: StoredScenario) -> Verdict:
    """The stored one; a reproducer keeps none: what was compared and reached is counted anew, its findings are kept."""
    if case.verdict is not None:
        return case.verdict.verdict()
    found = group(case.findings)
    judged, _ = judge(case.scenario, case.engine, case.reference)
    outcome = Outcome.FAIL if found else Outcome.UNKNOWN
    return replace(judged, outcome=outcome, kinds=kinds(found), root_kinds=kinds(found, roots_only=True))


def _described(known: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """The handshake of the first scenario that has one, then what the manifest says."""
    headers = (header_of(trace_files(folder, "engine")["json"]) for folder in folders)
    return {**next((header for header in headers if header), {}), **{k: v for k, v in known.items() if v is not None}}
