"""Findings that a night need not report anew, by signature, release and cell: those of docs/findings, or of a file.

An entry is made only for what was seen on that release; everything else is new. This module must not judge.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cases.catalogue import CaseError
from harness.contract import plain_files
from harness.contract.finding_pages import CellPattern, Rate, Release, Signature, issues
from harness.contract.json_files import BadDocument, validated

#: Where it is said what a file is made of.
DESCRIBED = "what it holds:  docs/nightly.md"


class Entry(BaseModel):
    """One [[known]] table of a file, or the `nights` of a known issue; docs/nightly.md says what its keys mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    issue: Annotated[str, Field(min_length=1)]
    what: Annotated[str, Field(min_length=1)]
    signatures: Annotated[tuple[Signature, ...], Field(min_length=1)]
    engines: Annotated[tuple[Release, ...], Field(min_length=1)]
    cells: Annotated[tuple[CellPattern, ...], Field(min_length=1)]
    expires: datetime.date
    rate: Rate = 1.0
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")

    def covers(self, signature: str, *, engine: str, place: str) -> bool:
        """Whether a finding is this one. place: the cell as kind/name."""
        return self.shown_by(signature) and self.asked(engine=engine, place=place)

    def shown_by(self, signature: str) -> bool:
        """Whether a signature is one of its own, which may be patterns."""
        return any(fnmatchcase(signature, one) for one in self.signatures)

    def asked(self, *, engine: str, place: str) -> bool:
        """Whether a cell could show it."""
        return engine in self.engines and any(fnmatchcase(place, pattern) for pattern in self.cells)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = Field(alias="schema")
    known: tuple[Entry, ...] = ()

    @model_validator(mode="after")
    def _once(self) -> _File:
        named = [
            (signature, engine, cell)
            for one in self.known
            for signature in one.signatures
            for engine in one.engines
            for cell in one.cells
        ]
        doubled = sorted({each for each in named if named.count(each) > 1})
        if doubled:
            raise ValueError(f"{doubled[0][0]} on {doubled[0][1]} in {doubled[0][2]} is named twice")
        return self


def read(path: Path | None = None) -> tuple[Entry, ...]:
    """Every entry of a file, of docs/findings without one; CaseError names the place and what is allowed there."""
    if path is None:
        return _ours()
    try:
        return validated(tomllib.loads(plain_files.named(path).decode()), _File).known
    except OSError as error:
        raise CaseError(
            f"cannot read known findings from {path}: {error.strerror}\n  name a file:  --known FILE"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CaseError(f"{path} is not TOML: {error}\n  {DESCRIBED}") from error
    except BadDocument as error:
        raise CaseError(f"{path}: {error}\n  {DESCRIBED}") from error


def _ours() -> tuple[Entry, ...]:
    return tuple(
        Entry(
            issue=one.id,
            what=one.title,
            signatures=one.signatures,
            engines=one.releases.seen,
            cells=night.cells,
            expires=night.expires,
            rate=night.rate,
            devices=night.devices or one.devices,
        )
        for one in issues().values()
        for night in one.nights
    )


def known_as(signature: str, release: str, *, place: str) -> Entry | None:
    """The entry that `signature` is on `release` in that cell (kind/name); None for a new one."""
    return next((one for one in read() if one.covers(signature, engine=release, place=place)), None)


def all_known(signatures: Iterable[str], release: str, *, place: str) -> frozenset[str]:
    """The ids of the known issues that explain all signatures there; empty if any of them is new."""
    found = [known_as(signature, release, place=place) for signature in signatures]
    return frozenset() if None in found else frozenset(one.issue for one in found if one is not None)
