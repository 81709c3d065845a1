"""Findings that are written up, by signature, release and cell: what need not be reported anew. Read from known.toml.

An entry is made only for what was seen on that release, with a specimen; everything else is new. It must not judge.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cases.catalogue import CaseError
from harness.contract import plain_files
from harness.contract.json_files import BadDocument, validated

FILE = Path(__file__).with_name("known.toml")


class Entry(BaseModel):
    """One [[known]] table; the file says what its keys mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    issue: Annotated[str, Field(min_length=1)]
    what: Annotated[str, Field(min_length=1)]
    signatures: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Z_]+:\S+:\S+:\S+$")], ...], Field(min_length=1)]
    engines: Annotated[
        tuple[Annotated[str, Field(pattern=r"^\d+(\.\d+)+(rc\d+|\.post\d+)?$")], ...], Field(min_length=1)
    ]
    cells: Annotated[tuple[Annotated[str, Field(pattern=r"^(case|fixed|generated)/.+$")], ...], Field(min_length=1)]
    expires: datetime.date
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0

    def covers(self, signature: str, *, engine: str, place: str) -> bool:
        """Whether a finding is this one. place: the cell as kind/name."""
        return signature in self.signatures and self.asked(engine=engine, place=place)

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


def read(path: Path = FILE) -> tuple[Entry, ...]:
    """Every entry of a file; CaseError names the place and what is allowed there."""
    try:
        return validated(tomllib.loads(plain_files.named(path).decode()), _File).known
    except OSError as error:
        raise CaseError(
            f"cannot read known findings from {path}: {error.strerror}\n  name a file:  --known FILE"
        ) from error
    except UnicodeDecodeError as error:
        raise CaseError(
            f"{path} is not TOML: byte {error.start} is not UTF-8 text\n  a working one:  {FILE}"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise CaseError(f"{path} is not TOML: {_fault(str(error))}\n  a working one:  {FILE}") from error
    except BadDocument as error:
        raise CaseError(f"{path}: {error}\n  a working one:  {FILE}") from error


#: What Python's reader of TOML calls a fault (a part of it), and what it is called here.
FAULTS = {
    "Cannot overwrite": "a key is there twice",
    "Cannot declare": "a table is there twice",
    "Cannot mutate": "a key is there twice",
    "Expected '='": "behind a key an equals sign is missing",
    "Invalid value": "a value is missing, or is none that TOML has: texts stand in double quotes",
    "Unclosed array": "a list is not closed",
    "Unterminated string": "a text in double quotes is not closed",
    "Invalid statement": "neither a key nor a [[known]] table begins there",
}
PLACE = re.compile(r"\(at (line \d+, column \d+|end of document)\)")


def _fault(said: str) -> str:
    """What tomllib said, in our words and with its place."""
    what = next((ours for theirs, ours in FAULTS.items() if theirs in said), "it cannot be read on from there")
    place = PLACE.search(said)
    return f"{place[1]}: {what}" if place else what


def known_as(signature: str, release: str, *, place: str) -> Entry | None:
    """The entry that `signature` is on `release` in that cell (kind/name); None for a new one."""
    return next((one for one in read() if one.covers(signature, engine=release, place=place)), None)


def all_known(signatures: Iterable[str], release: str, *, place: str) -> frozenset[str]:
    """The numbers of the findings that explain all signatures there; empty if any of them is new."""
    found = [known_as(signature, release, place=place) for signature in signatures]
    return frozenset() if None in found else frozenset(one.issue for one in found if one is not None)
