"""What a report's page reads of documents that other commands wrote: `matrix --json` and `mutants --json`.

They may hold more (docs/json.md); what the page needs must be there. It must not read files.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Place(_Read):
    """The first wrong place of a cell."""

    rid: str
    committed_len: int
    round: int
    phase: str
    step: int
    slot: int
    expected: Any
    observed: Any


class Cell(_Read):
    """One cell of a matrix."""

    engine: str
    case: str
    revert: int | None
    verdict: Literal["PASS", "FAIL", "UNKNOWN"]
    expected: Literal["PASS", "FAIL", "unknown"]
    kinds: list[str]
    first: Place | None
    text_identical: bool | None


class Matrix(_Read):
    """What `matrix --json` writes."""

    schema_version: Literal[1] = Field(alias="schema")
    cells: list[Cell]


class Mutant(_Read):
    """One mutant of a scoreboard."""

    id: str
    what: str
    verdict: str
    why: str | None
    killed_by: list[str]
    kinds: list[str]
    text_identical: bool | None


class Mutants(_Read):
    """What `mutants --json` writes."""

    schema_version: Literal[1] = Field(alias="schema")
    engine: str
    verdict: Literal["PASS", "FAIL", "UNKNOWN"]
    mutants: list[Mutant]
