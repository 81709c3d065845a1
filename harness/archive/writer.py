"""Writes run folders and reproducer folders; the file that marks one complete comes last. `store` reads them.

This module must not judge, and nothing here is pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel

from harness.archive import digests
from harness.archive.again import run_again
from harness.archive.faults import readable_errors
from harness.archive.records import (
    STORE_VERSION,
    ReproducerManifest,
    RunManifest,
    RunVerdict,
    ScenarioVerdict,
    finding_line,
)
from harness.archive.run_folders import EVENTS, FINDINGS, LATEST, MANIFEST, SCENARIO, VERDICT, lock
from harness.archive.store import read_model
from harness.archive.trace_io import plain, write_trace
from harness.contract import plain_files
from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Divergence, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWriter:
    """Writes one run folder. `create` starts it, `finish` ends it.

    alive: the manifest, locked for as long as this process writes, so that a live run is not taken for a dead one.
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

    def close(self) -> None:
        """Nothing more will be written; called twice is once."""
        if self.alive is not None:
            self.alive.close()

    def append_event(self, event: Mapping[str, Any]) -> None:
        """One line in engine.jsonl, visible to readers at once."""
        line = json.dumps(plain(event), sort_keys=True, allow_nan=False) + "\n"
        with _disk(self.folder), (self.folder / EVENTS).open("ab") as file:
            file.write(line.encode())  # one write: a reader never sees half a line

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
        last = {VERDICT: _content(ScenarioVerdict.of(scenario, verdict))}
        with _disk(self.folder):
            _write_case(folder, scenario, engine, reference, divergences, last=last)
        return folder

    def finish(self, verdict: Verdict) -> Path:
        """Write the run's verdict.json; after this the run is complete."""
        scenarios = [read_model(path, ScenarioVerdict) for path in sorted(self.folder.glob(f"*/{VERDICT}"))]
        kept = [path for path in (self.folder / MANIFEST, self.folder / EVENTS) if path.exists()]
        with _disk(self.folder):
            _seal(
                self.folder,
                [*kept, *self.folder.glob(f"*/{digests.SUMS}")],
                last={VERDICT: _content(RunVerdict.of(verdict, scenarios))},
            )
        self.close()
        return self.folder / VERDICT


def write_reproducer(
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
    manifest = ReproducerManifest(
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
        _write_case(folder, scenario, engine, reference, divergences, last={MANIFEST: _content(manifest)})
    return folder


def _write_case(
    folder: Path,
    scenario: Scenario,
    engine: Trace,
    reference: Trace | None,
    divergences: Iterable[Divergence],
    *,
    last: Mapping[str, bytes],
) -> None:
    """last: the file without which the folder counts as cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_model(folder / SCENARIO, scenario)
    files = [folder / SCENARIO, folder / FINDINGS]
    for trace in (engine, reference):
        files += [] if trace is None else write_trace(folder, trace)
    lines = [finding_line(found).model_dump_json() for found in divergences]
    _write_whole(folder / FINDINGS, "".join(f"{line}\n" for line in lines).encode())
    _seal(folder, files, last=last)


def _seal(folder: Path, files: Iterable[Path], *, last: Mapping[str, bytes]) -> None:
    """Keep the digests of what was written, then write what makes the folder whole."""
    _write_whole(folder / digests.SUMS, digests.sums_of(folder, files, also=last))
    for name, content in last.items():
        _write_whole(folder / name, content)


def _write_model(path: Path, model: BaseModel) -> None:
    _write_whole(path, _content(model))


def _content(model: BaseModel) -> bytes:
    return (model.model_dump_json(indent=1) + "\n").encode()


def _write_whole(path: Path, content: bytes) -> None:
    with _disk(path.parent):
        plain_files.replace(path, content, sync=True)


def _disk(folder: Path) -> contextlib.AbstractContextManager[None]:
    kept = "what was written before is kept; the run counts as incomplete"
    return readable_errors(folder, kept=kept, instead=lambda: f"run again:  {run_again(folder)}")


def _point_latest(root: Path, folder: Path) -> None:
    draft = root / f".{LATEST}-{folder.name}"
    with _disk(root):
        draft.symlink_to(folder.name)
        os.replace(draft, root / LATEST)
