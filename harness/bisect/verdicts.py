"""What counts as the failure, what one run says about it, and runs remembered.

They are kept by scenario and checkpoints, engine identity and lock, and the version of our own checks: an entry that no
longer fits any of them is not found, never used in part. Runs without a verdict are not kept: what kept an engine from
starting yesterday need not do so today.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.archive.faults import home_room
from harness.bisect.search import Call
from harness.contract import plain_files
from harness.contract.types import Outcome
from harness.engines.dependencies import home

#: Of the file format.
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure by its signature, or by the kinds a corpus case shows first; neither: whatever is seen first."""

    signature: str = ""
    kinds: tuple[str, ...] = ()

    def describe(self) -> str:
        if self.signature:
            return f"signature {self.signature}"
        return f"kind {' or '.join(self.kinds)}" if self.kinds else "any divergence"

    def shown_by(self, run: Run) -> bool:
        if self.signature:
            return self.signature in run.signatures
        return not self.kinds or bool(set(self.kinds) & set(run.kinds))


class Run(BaseModel):
    """One run of the scenario on one version: the part of a verdict that a search needs, and a line of the cache.

    kinds, signatures: of divergences that nothing earlier explains, the first one first. run: its folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    outcome: Outcome
    kinds: tuple[str, ...] = ()
    signatures: tuple[str, ...] = ()
    why: str = ""
    run: str = ""
    seconds: float = 0.0

    def call(self, failure: Failure) -> Call:
        """What it says about the failure; a scenario that diverges otherwise says nothing about it."""
        if self.outcome is Outcome.PASS:
            return "good"
        return "bad" if self.outcome is Outcome.FAIL and failure.shown_by(self) else "unknown"

    def reason(self, failure: Failure) -> str:
        """One line for people."""
        if self.outcome is Outcome.PASS:
            return "agrees with the reference"
        if self.outcome is Outcome.FAIL:
            found = ", ".join(self.kinds)
            shown = failure.shown_by(self)
            return f"diverges: {found}" if shown else f"diverges otherwise: {found}; not {failure.describe()}"
        first = self.why.partition("\n")[0]
        return first.partition("; full log:")[0].strip() or "no verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One file an identity, under `<home>/verdicts`. Several processes may add to it."""

    folder: Path

    @classmethod
    def at_home(cls) -> Cache:
        return cls(folder=home() / "verdicts")

    def runs(self, identity: Mapping[str, Any]) -> list[Run]:
        """The runs kept under this identity, oldest first; a line that is not whole is not there."""
        try:
            lines = plain_files.content(self._path(identity)).decode(errors="replace").splitlines()
        except OSError:
            return []
        return [run for run in map(_run, lines[1:]) if run is not None]

    def add(self, identity: Mapping[str, Any], run: Run) -> None:
        """Keep a run that has a verdict."""
        if run.outcome is Outcome.UNKNOWN:
            return
        path = self._path(identity)
        text = run.model_dump_json(exclude={"why"}) + "\n"
        if not path.exists():
            text = json.dumps(dict(identity), sort_keys=True) + "\n" + text
        with home_room(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:  # one write: lines of two processes do not mix
                file.write(text.encode())

    def _path(self, identity: Mapping[str, Any]) -> Path:
        return self.folder / f"{identity['scenario']}-{digest({**identity, 'version': VERSION})}.jsonl"


def _run(line: str) -> Run | None:
    try:
        return Run.model_validate_json(line)
    except ValidationError:
        return None


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(content), sort_keys=True).encode()).hexdigest()[:20]


def folder_digest(folders: tuple[Path, ...]) -> str:
    """Content hash of the weights and settings in checkpoint folders."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]
