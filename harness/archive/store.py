"""Reads run folders and reproducer folders.

runs/<utc>-<short id>/ holds manifest.json (first), engine.jsonl (appended while running), one folder a scenario, and
verdict.json (last, whole or not at all). A folder without verdict.json is incomplete by definition and says so.
This module must not judge, and nothing here is pickle.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from harness.archive import digests
from harness.archive.again import events, run_again, short
from harness.archive.facts import contradiction
from harness.archive.faults import DamagedError, NotThere, StoreError, UnreadableError
from harness.archive.records import (
    STORE_VERSION,
    FindingLine,
    ReproducerManifest,
    RunManifest,
    RunVerdict,
    ScenarioVerdict,
)
from harness.archive.run_folders import (
    EVENTS,
    FINDINGS,
    MANIFEST,
    REPRODUCERS,
    SCENARIO,
    VERDICT,
    is_locked,
    known_runs,
    near,
    unfinished,
)
from harness.archive.trace_io import read_trace, trace_files
from harness.contract import plain_files, scenario_v1
from harness.contract.json_files import BadDocument, NotJSON, parsed, shown, validated
from harness.contract.known_issues import assumed_in
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Divergence
from harness.contract.words import counted

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScenario:
    """One judged scenario as it lies on disk. reference is None where none was kept."""

    folder: Path
    scenario: Scenario
    engine: Trace
    reference: Trace | None
    findings: tuple[Divergence, ...]
    verdict: ScenarioVerdict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReader:
    """Reads one run folder; StoreError for anything unfit. verdict is None only for an incomplete run.

    unfinished: why there is no verdict, as the end of "the run is …"; live: because it still runs.
    """

    folder: Path
    manifest: RunManifest
    verdict: RunVerdict | None
    unfinished: str = ""
    live: bool = False

    @classmethod
    def open(cls, folder: Path, *, allow_incomplete: bool = False) -> RunReader:
        """The run in `folder` (the `latest` link will do)."""
        if not folder.is_dir():
            why = f"{folder} is a file, no folder" if folder.exists() else f"there is no folder {folder}"
            said, nearest = near(folder)
            raise NotThere(
                f"{why}: looked for a run, a scenario or a reproducer\n  {said}", wrong=folder, instead=nearest
            )
        if not any((folder / name).exists() for name in (MANIFEST, EVENTS, VERDICT)):
            raise StoreError(f"{folder} is not a run folder: it has no {MANIFEST}\n  {known_runs(folder)}")
        folder = folder.resolve()
        manifest = read_model(folder / MANIFEST, RunManifest)
        verdict = read_verdict(folder, RunVerdict)
        if verdict is not None:
            _check_sums(folder, verdict)
            return cls(folder=folder, manifest=manifest, verdict=verdict)
        live = is_locked(folder)
        why = "still running" if live else unfinished(folder)
        if not allow_incomplete:
            judged = len(list(folder.glob(f"*/{VERDICT}")))
            raise StoreError(
                f"run {folder} is {why}\n  {counted(judged, 'scenario')} of it {'is' if judged == 1 else 'are'} "
                f"judged\n  judge what is there:  eaglecheck recheck {folder}"
            )
        return cls(folder=folder, manifest=manifest, verdict=None, unfinished=why, live=live)

    def scenario_folders(self) -> list[Path]:
        """The folders of all scenarios that left a scenario.json, as they were driven; of older runs by name."""
        driven = events(self.folder, "scenario")
        order = {f"{one.get('name')}-{one.get('id')}": number for number, one in enumerate(driven)}
        folders = (path.parent for path in self.folder.glob(f"*/{SCENARIO}"))
        return sorted(folders, key=lambda folder: (order.get(folder.name, len(order)), folder.name))

    def judged(self) -> dict[Path, ScenarioVerdict]:
        """Those that were stored whole, with their verdicts: a scenario's verdict is written last."""
        found = ((folder, read_verdict(folder, ScenarioVerdict)) for folder in self.scenario_folders())
        return {folder: verdict for folder, verdict in found if verdict is not None}

    def some_judged(self) -> dict[Path, ScenarioVerdict]:
        """`judged`; UnreadableError where nothing was, and nobody writes it any more."""
        found = self.judged()
        if not found and not self.live:
            raise UnreadableError(
                f"run {self.folder} holds no scenario that was judged\n  run again:  {run_again(self.folder)}"
            )
        return found

    def gone(self, there: Iterable[Path]) -> str:
        """The first scenario that a whole run judged and that is not among its folders; empty where all are."""
        named = () if self.verdict is None else self.verdict.scenarios
        names = {f"{one.scenario}-{one.scenario_id}" for one in named}
        return min(names - {folder.name for folder in there}, default="")

    def scenarios(self, *, reference: bool = True) -> Iterator[StoredScenario]:
        """Every scenario, one at a time: traces can be large. reference False: its trace is not looked at."""
        return (read_case(folder, reference=reference) for folder in self.scenario_folders())


def read_case(folder: Path, *, reference: bool = True) -> StoredScenario:
    """One scenario folder or reproducer folder. reference False: its trace is not looked at, whatever is left of it."""
    scenario = read_model(folder / SCENARIO, Scenario, upgrade=scenario_v1.upgraded)
    has_reference = reference and trace_files(folder, "reference")["json"].exists()
    engine = read_trace(folder, "engine")
    if (folder.parent / MANIFEST).exists():
        _agree(folder.parent / MANIFEST, read_model(folder.parent / MANIFEST, RunManifest).engine, engine)
    if (folder / MANIFEST).exists():
        _agree(folder / MANIFEST, read_model(folder / MANIFEST, ReproducerManifest), engine)
    return StoredScenario(
        folder=folder,
        scenario=scenario,
        engine=engine,
        reference=read_trace(folder, "reference") if has_reference else None,
        findings=tuple(read_findings(folder / FINDINGS)),
        verdict=read_verdict(folder, ScenarioVerdict),
    )


def read_verdict(folder: Path, model: type[Model]) -> Model | None:
    """The verdict a run or a scenario ended with; None where it is gone or cut off, which comes to the same."""
    if not (folder / VERDICT).exists():
        return None
    try:
        return read_model(folder / VERDICT, model)
    except DamagedError:
        return None


def read_findings(path: Path) -> Iterator[Divergence]:
    """The divergences of findings.jsonl."""
    content = _bytes(path, gone="the folder is incomplete")
    for number, line in enumerate(content.splitlines(), 1):
        yield _validated(path, FindingLine, _json_object(path, number, line), line=number).divergence()
    _unchanged(path, content)


def reproducers_in(run: Path) -> list[Path]:
    """The reproducer folders of a run, or of a night."""
    return sorted(path.parent for name in REPRODUCERS for path in run.glob(f"{name}/*/{MANIFEST}"))


def reproducer_of(folder: Path) -> Path | None:
    """The reproducer that a run left for a scenario, as it is typed from here, or what is one; None: not (any more)."""
    beside = [folder] if (folder / MANIFEST).is_file() else reproducers_in(folder.parent)
    return next((short(place) for place in beside if place.name == folder.name), None)


def read_reproducer(folder: Path) -> tuple[ReproducerManifest, StoredScenario]:
    """What `write_reproducer` wrote. StoreError for anything else, a whole run among it."""
    if not (folder / SCENARIO).exists() and (folder / EVENTS).exists():
        inside = reproducers_in(folder)
        some = str(inside[0]) if inside else "there is none in it"
        raise StoreError(f"{folder} is a run; expected a reproducer\n  one of its reproducers:  {some}")
    return read_model(folder / MANIFEST, ReproducerManifest), read_case(folder)


def started_with(manifest: ReproducerManifest, case: StoredScenario) -> tuple[tuple[str, ...], str]:
    """(known issues that were assumed, attention on a CPU) that a reproducer was made with, for starting it again.

    A reproducer of before either was kept says what its reference took for granted, and `torch`.
    """
    header = manifest.header if case.reference is None else case.reference.header
    return assumed_in(header) or assumed_in(manifest.header), str(manifest.header.get("cpu_attention", "torch"))


def _agree(path: Path, said: BaseModel, engine: Trace) -> None:
    """StoreError for a manifest that is of another engine than the trace."""
    if wrong := contradiction(said, engine.header):
        raise UnreadableError(f"{path} is not of the engine that was driven: {wrong}\n  {_again(path)}")


def read_model(path: Path, model: type[Model], *, upgrade: Callable[[Any], Any] = lambda content: content) -> Model:
    """A file of a folder as a `model`. upgrade: brings the content of an older version into today's names."""
    content = _bytes(path, gone="not one of our folders, or an incomplete one")
    try:
        today = upgrade(_json_object(path, 1, content))
    except BadDocument as error:
        raise UnreadableError(f"{path}, line 1: {error}\n  {_again(path)}") from error
    found = _validated(path, model, today)
    _unchanged(path, content)  # last: whoever finds out more says more
    return found


def _bytes(path: Path, *, gone: str = "it was there a moment ago") -> bytes:
    """What is in a file of a folder; StoreError where it is none. gone: what it means that it is not there."""
    try:
        return plain_files.content(path)
    except FileNotFoundError as error:
        raise UnreadableError(f"{path} is missing: {gone}\n  {_again(path)}") from error
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}\n  {_again(path)}") from error


def _unchanged(path: Path, content: bytes) -> None:
    """StoreError for a file whose bytes are not those that were written."""
    sums, written = path.with_name(digests.SUMS), digests.read_sums(path.parent)
    if digests.unreadable(path.parent, written):
        raise _damaged(sums, "no line of it is a digest")
    if digests.silent(written, path.name):
        raise _damaged(sums, f"it has no line for {path.name}")
    if digests.changed(written, path.name, content):
        raise _damaged(path)


def _check_sums(folder: Path, verdict: RunVerdict) -> None:
    """The events of a whole run, and the digests of its scenarios, are there and are those that it ended with."""
    kept = digests.read_sums(folder)
    inner = {f"{one.scenario}-{one.scenario_id}/{digests.SUMS}" for one in verdict.scenarios}
    if kept and set(kept) - {EVENTS} != {MANIFEST, VERDICT, *inner}:
        raise _damaged(folder / digests.SUMS, "other names than those of the run's files")
    for name in sorted(set(kept) - {MANIFEST, VERDICT}):
        path = folder / name
        if path.parent.is_dir() and not path.is_file():
            raise UnreadableError(
                f"{path} is missing: it was there when the run ended\n  {_again(path)}\n  {_on_purpose(path)}"
            )
        if path.is_file() and digests.changed(kept, name, _bytes(path)):
            raise _damaged(path)


def _damaged(path: Path, found: str = digests.CHANGED) -> UnreadableError:
    return UnreadableError(f"{path} is damaged: {found}\n  {_again(path)}\n  {_on_purpose(path)}")


def _on_purpose(path: Path) -> str:
    """What to type so that a folder is taken as it is now: a run's digests speak of its scenarios' digests."""
    places = [path.with_name(digests.SUMS), path.parent.parent / digests.SUMS]
    there = [shlex.quote(str(one)) for one in places if os.path.lexists(one)]
    return f"if you changed it yourself, remove what it is compared with:  rm -r {' '.join(there)}"


def _json_object(path: Path, line: int, content: bytes) -> dict[str, Any]:
    try:
        found = parsed(content)
    except NotJSON as error:
        raise DamagedError(f"{path}, line {line}: not whole JSON ({error})\n  {_again(path)}") from error
    if not isinstance(found, dict):
        raise UnreadableError(f"{path}, line {line}: {shown(found)}, not an object\n  {_again(path)}")
    return found


def _validated(path: Path, model: type[Model], content: dict[str, Any], *, line: int = 1) -> Model:
    version = content.get("store_version")
    if isinstance(version, int) and version > STORE_VERSION:
        raise UnreadableError(
            f"{path} has store version {version}; this eaglecheck reads up to {STORE_VERSION}\n  update eaglecheck"
        )
    try:
        return validated(content, model)
    except BadDocument as error:
        raise UnreadableError(f"{path}, line {line}: {error}\n  {_again(path)}") from error


def _again(path: Path) -> str:
    folder = path.parent
    return f"the folder cannot be used as it is; run again:  {run_again(folder)}\n  or look at it:  ls -l {folder}"
