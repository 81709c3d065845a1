"""Run folders and specimen folders: what was run, what was seen, what was judged, in that order on disk.

runs/<utc>-<short id>/ holds manifest.json (first), engine.jsonl (appended while running), one folder a scenario, and
verdict.json (last, whole or not at all). A folder without verdict.json is incomplete by definition and says so.
This module must not judge, and nothing here is pickle.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from harness.archive.records import (
    STORE_VERSION,
    FindingLine,
    RunManifest,
    RunVerdict,
    ScenarioVerdict,
    SpecimenManifest,
    finding_line,
)
from harness.archive.run_folders import (
    EVENTS,
    FINDINGS,
    LATEST,
    MANIFEST,
    SCENARIO,
    VERDICT,
    is_locked,
    known_runs,
    lock,
    near,
    unfinished,
)
from harness.archive.trace_io import plain, read_trace, trace_files, write_trace
from harness.contract.trace import Trace
from harness.contract.types import Divergence, Scenario, Verdict
from harness.contract.words import counted

Model = TypeVar("Model", bound=BaseModel)

#: Where a run keeps its failures, each a folder that `replay` takes.
SPECIMENS = "specimens"


class StoreError(Exception):
    """A folder that cannot be written or read; the text is meant for people."""


class DamagedError(StoreError):
    """A file that is not whole JSON."""


class WriteError(StoreError):
    """The place where a run is kept takes no more (full disk, folder gone): nothing can be said about the engine."""


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
class RunWriter:
    """Writes one run folder. `create` starts it, `attach` joins it (another worker), `finish` ends it.

    alive: the manifest, locked for as long as this process writes, so that a run that goes on is told from a dead one.
    """

    folder: Path
    alive: BinaryIO | None = field(default=None, repr=False, compare=False)

    @classmethod
    def create(cls, root: Path, *, manifest: Mapping[str, Any]) -> RunWriter:
        """A new folder under `root`, with manifest.json in it and `latest` pointing at it.

        manifest: the fields of RunManifest that the caller knows (argv, engine, ...).
        """
        now = datetime.now(UTC)
        folder = root / f"{now:%Y%m%d-%H%M}-{secrets.token_hex(2)}"
        with _disk(folder):
            folder.mkdir(parents=True)
        full = {"store_version": STORE_VERSION, "run_id": folder.name, "created": now.isoformat(timespec="seconds")}
        _write_model(folder / MANIFEST, RunManifest.model_validate({**full, **plain(manifest)}))
        _point_latest(root, folder)
        return cls(folder=folder, alive=lock(folder))

    @classmethod
    def attach(cls, folder: Path) -> RunWriter:
        """Join a run that another process created and nobody has finished."""
        _read_model(folder / MANIFEST, RunManifest)
        if (folder / VERDICT).exists():
            raise StoreError(f"run {folder} is finished: {VERDICT} is there\n  start a new one:  eaglecheck run")
        return cls(folder=folder, alive=lock(folder))

    def close(self) -> None:
        """Nothing more will be written; called twice is once."""
        if self.alive is not None:
            self.alive.close()

    def append_event(self, event: Mapping[str, Any]) -> None:
        """One line in engine.jsonl, visible to readers at once."""
        line = json.dumps(plain(event), sort_keys=True, allow_nan=False) + "\n"
        with _disk(self.folder), (self.folder / EVENTS).open("ab") as file:
            file.write(line.encode())  # one write: lines of several workers do not mix

    def save_scenario(
        self,
        scenario: Scenario,
        *,
        engine: Trace,
        reference: Trace | None,
        verdict: Verdict,
        divergences: Iterable[Divergence],
    ) -> Path:
        """Everything about one scenario, its verdict.json last. Returns its folder."""
        folder = self.folder / f"{scenario.name}-{scenario.id}"
        with _disk(self.folder):
            _write_case(folder, scenario, engine, reference, divergences)
            _write_model(folder / VERDICT, ScenarioVerdict.of(scenario, verdict))
        return folder

    def finish(self, verdict: Verdict) -> Path:
        """Write the run's verdict.json; after this the run is complete."""
        scenarios = [_read_model(path, ScenarioVerdict) for path in sorted(self.folder.glob(f"*/{VERDICT}"))]
        with _disk(self.folder):
            _write_model(self.folder / VERDICT, RunVerdict.of(verdict, scenarios))
        self.close()
        return self.folder / VERDICT


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
            raise StoreError(
                f"there is no folder {folder}: looked for a run, a scenario or a specimen\n  {near(folder)}"
            )
        if not (folder / MANIFEST).exists():
            raise StoreError(f"{folder} is not a run folder: it has no {MANIFEST}\n  {known_runs(folder)}")
        folder = folder.resolve()
        manifest = _read_model(folder / MANIFEST, RunManifest)
        verdict = read_verdict(folder, RunVerdict)
        if verdict is not None:
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
        """The folders of all scenarios that left a scenario.json."""
        return sorted(path.parent for path in self.folder.glob(f"*/{SCENARIO}"))

    def scenarios(self) -> Iterator[StoredScenario]:
        """Every scenario, one at a time: traces can be large."""
        return (read_case(folder) for folder in self.scenario_folders())

    def events(self) -> list[dict[str, Any]]:
        """The lines of engine.jsonl; a half line ending an incomplete run is left out."""
        path = self.folder / EVENTS
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")
        cut_off = bool(lines[-1]) and self.verdict is None
        return [
            _json_object(path, number, line) for number, line in enumerate(lines[: -1 if cut_off else None], 1) if line
        ]


def read_case(folder: Path) -> StoredScenario:
    """One scenario folder or specimen folder."""
    scenario = _read_model(folder / SCENARIO, Scenario)
    has_reference = trace_files(folder, "reference")["json"].exists()
    return StoredScenario(
        folder=folder,
        scenario=scenario,
        engine=read_trace(folder, "engine"),
        reference=read_trace(folder, "reference") if has_reference else None,
        findings=tuple(read_findings(folder / FINDINGS)),
        verdict=read_verdict(folder, ScenarioVerdict),
    )


def read_verdict(folder: Path, model: type[Model]) -> Model | None:
    """The verdict a run or a scenario ended with; None where it is gone or cut off, which comes to the same."""
    if not (folder / VERDICT).exists():
        return None
    try:
        return _read_model(folder / VERDICT, model)
    except DamagedError:
        return None


def read_findings(path: Path) -> Iterator[Divergence]:
    """The divergences of findings.jsonl."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: the folder is incomplete\n  {_again(path)}") from error
    for number, line in enumerate(lines, 1):
        yield _validated(path, FindingLine, _json_object(path, number, line), line=number).divergence()


def write_specimen(
    folder: Path,
    scenario: Scenario,
    *,
    engine: Trace,
    reference: Trace | None,
    divergences: Iterable[Divergence],
    signature: str,
    replay: str,
) -> Path:
    """A small folder that reproduces one failure anywhere: scenario, traces, findings, manifest.

    replay: the one command that runs it again. Returns the folder.
    """
    header = engine.header
    manifest = SpecimenManifest(
        store_version=STORE_VERSION,
        scenario=scenario.name,
        scenario_id=scenario.id,
        release=str(header.get("release", "unknown")),
        device=str(header.get("device", "unknown")),
        header=plain(header),
        signature=signature,
        replay=replay,
    )
    with _disk(folder):
        _write_case(folder, scenario, engine, reference, divergences)
        _write_model(folder / MANIFEST, manifest)
    return folder


def read_specimen(folder: Path) -> tuple[SpecimenManifest, StoredScenario]:
    """What `write_specimen` wrote. StoreError for anything else, a whole run among it."""
    if not (folder / SCENARIO).is_file() and (folder / SPECIMENS).is_dir():
        inside = sorted(path.name for path in (folder / SPECIMENS).iterdir())
        some = f"{folder / SPECIMENS / inside[0]}" if inside else "there is none in it"
        raise StoreError(f"{folder} is a run, and a specimen is wanted\n  one of its specimens:  {some}")
    return _read_model(folder / MANIFEST, SpecimenManifest), read_case(folder)


def _write_case(
    folder: Path, scenario: Scenario, engine: Trace, reference: Trace | None, divergences: Iterable[Divergence]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write_model(folder / SCENARIO, scenario)
    for trace in (engine, reference):
        if trace is not None:
            write_trace(folder, trace)
    lines = [finding_line(found).model_dump_json() for found in divergences]
    _write_whole(folder / FINDINGS, "".join(f"{line}\n" for line in lines).encode())


def _write_model(path: Path, model: BaseModel) -> None:
    _write_whole(path, (model.model_dump_json(indent=1) + "\n").encode())


def _write_whole(path: Path, content: bytes) -> None:
    """Whole or not at all, and on the disk before the name is: a verdict must survive a power cut."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    with _disk(path.parent):
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Turn a disk that takes no more into text that says what to do."""
    try:
        yield
    except OSError as error:
        kept = "what was written before is kept; the run counts as incomplete"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise WriteError(
                f"cannot write to {folder}: {error.strerror}\n  {kept}\n  run again:  eaglecheck run"
            ) from error
        place = next(path for path in (folder, *folder.parents) if path.exists())
        raise WriteError(
            f"the disk is full: cannot write to {folder}, {shutil.disk_usage(place).free} bytes free\n"
            f"  {kept}\n"
            f"  see what is large:  du -sh {folder.parent}/* | sort -h"
        ) from error


def _point_latest(root: Path, folder: Path) -> None:
    draft = root / f".{LATEST}-{folder.name}"
    with _disk(root):
        draft.symlink_to(folder.name)
        os.replace(draft, root / LATEST)


def _read_model(path: Path, model: type[Model]) -> Model:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(
            f"{path} is missing: not one of our folders, or an incomplete one\n  {_again(path)}"
        ) from error
    return _validated(path, model, _json_object(path, 1, content))


def _json_object(path: Path, line: int, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DamagedError(f"{path}, line {line}: not whole JSON ({error})\n  {_again(path)}") from error
    if not isinstance(found, dict):
        raise StoreError(f"{path}, line {line}: a {type(found).__name__}, not an object\n  {_again(path)}")
    return found


def _validated(path: Path, model: type[Model], content: dict[str, Any], *, line: int = 1) -> Model:
    version = content.get("store_version")
    if isinstance(version, int) and version > STORE_VERSION:
        raise StoreError(
            f"{path} has store version {version}; this eaglecheck reads up to {STORE_VERSION}\n  update eaglecheck"
        )
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors()[:3]]
        allowed = ", ".join(model.model_fields)
        raise StoreError(
            f"{path}, line {line}: {'; '.join(faults)}\n  allowed keys: {allowed}\n  {_again(path)}"
        ) from error


def _again(path: Path) -> str:
    return f"the folder cannot be used as it is; run again, or look at it:  ls -l {path.parent}"
