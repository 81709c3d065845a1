"""Runs remembered: by scenario and checkpoints, engine identity and lock, and the version of our own checks.

An entry that no longer fits any of them is not found, never used in part. Runs without a verdict are not kept: what
kept an engine from starting yesterday need not do so today. It must not judge.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.bisect.subjects import Run
from harness.contract import plain_files
from harness.contract.types import Outcome
from harness.engines.closure import home

#: Of the file format.
VERSION = 1
#: Our files that a verdict depends on: everything but the commands, this package and the tests.
_ROOMS = ("harness", "reference", "cases")
_LEFT_OUT = ("harness/cli", "harness/bisect", "cases/meta", "cases/test_", "cases/corpus", "cases/recorded")


class _Entry(BaseModel):
    """One line of a file: one run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    outcome: Outcome
    kinds: tuple[str, ...]
    signatures: tuple[str, ...]
    run: str
    seconds: float


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
        found = (_entry(line) for line in lines[1:])
        return [Run(**entry.model_dump()) for entry in found if entry is not None]

    def add(self, identity: Mapping[str, Any], run: Run) -> None:
        """Keep a run that has a verdict."""
        if run.outcome is Outcome.UNKNOWN:
            return
        path = self._path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = _Entry(
            outcome=run.outcome, kinds=run.kinds, signatures=run.signatures, run=run.run, seconds=run.seconds
        )
        text = entry.model_dump_json() + "\n"
        if not path.exists():
            text = json.dumps(dict(identity), sort_keys=True) + "\n" + text
        with path.open("ab") as file:  # one write: lines of two processes do not mix
            file.write(text.encode())

    def _path(self, identity: Mapping[str, Any]) -> Path:
        return self.folder / f"{identity['scenario']}-{digest({**identity, 'version': VERSION})}.jsonl"


def _entry(line: str) -> _Entry | None:
    try:
        return _Entry.model_validate_json(line)
    except ValidationError:
        return None


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(content), sort_keys=True).encode()).hexdigest()[:20]


@cache
def checks_version() -> str:
    """Content hash of our own code that drives, computes and judges."""
    root = Path(__file__).resolve().parents[2]
    found = hashlib.sha256()
    for room in _ROOMS:
        for folder, _, names in sorted(os.walk(root / room)):
            for name in sorted(names):
                path = Path(folder, name)
                label = path.relative_to(root).as_posix()
                if path.suffix == ".py" and not label.startswith(_LEFT_OUT):
                    found.update(f"{label}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def folder_digest(folders: tuple[Path, ...]) -> str:
    """Content hash of the weights and settings in checkpoint folders."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]
