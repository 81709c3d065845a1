"""What manifests and trace headers record about an engine, as typed models.

A manifest is ours, so that every key is known; an engine may report more than is read here, and what is read has its
type. It must not touch the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, Field

from harness.contract.json_files import BadDocument, validated
from harness.contract.known_issues import UnknownIssue, checked
from harness.contract.requests import Strict

#: What a manifest and the engine's own header must agree on.
SAME = ("release", "device", "revert")


def _version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        raise ValueError(f"{text!r} is not a release\n  allowed: a version such as 0.5.23") from error
    return text


def _known(ids: tuple[str, ...]) -> tuple[str, ...]:
    try:
        checked(ids)
    except UnknownIssue as error:
        raise ValueError(str(error)) from error
    return ids


Release = Annotated[str, AfterValidator(_version)]
Device = Literal["cpu", "cuda"]
Revert = Annotated[int, Field(ge=1)]
Pair = Annotated[tuple[str, ...], Field(min_length=2, max_length=2)]
Assumed = Annotated[tuple[str, ...], AfterValidator(_known)]
Attention = Literal["torch", "interpreted"]


class EngineFacts(Strict):
    """The object `engine` of a run's manifest; None where a run does not say."""

    release: Release | None = None
    device: Device | None = None
    revert: Revert | None = None
    torch: str | None = None
    python: str | None = None
    cpu_attention: Attention | None = None
    pair: Pair | None = None
    assumed: Assumed | None = None
    reference: str | None = None

    def known(self) -> dict[str, Any]:
        """What it says, as JSON has it."""
        return self.model_dump(mode="json", exclude_none=True)


class CheckpointFacts(Strict):
    """What a run says of one folder of a user's pair. sha256: file -> digest."""

    folder: str
    architecture: str
    parameters: int | None
    hidden: int | None
    layers: int | None
    vocab: int | None
    dtype: str
    sha256: dict[str, str]
    of_target: bool = False


class PairFacts(Strict):
    """The object `pair` of a run's manifest."""

    algorithm: str
    target: CheckpointFacts
    draft: CheckpointFacts


class _Replaced(BaseModel):
    operation: str
    subject: str
    by: str


class _HeaderFacts(BaseModel):
    """The keys of a header that are read anywhere."""

    release: str = ""
    device: Device | Literal["", "unknown"] = ""
    revert: Revert | None = None
    tree: str | None = None
    worker: str = ""
    overlap: bool | None = None
    backend: str = ""
    dtype: str = ""
    torch: str = ""
    context_length: Annotated[int, Field(ge=1)] | None = None
    eos_token_ids: tuple[int, ...] = ()
    truncates_at_finish: bool = False
    hooks_missing: tuple[str, ...] | None = None
    hooks_optional: tuple[str, ...] | None = None
    replaced: tuple[_Replaced, ...] | None = None
    metadata_widths: dict[str, int] | None = None
    faults: tuple[str, ...] = ()
    asked: dict[str, Any] = {}
    given: dict[str, Any] = {}
    changed_files: tuple[str, ...] = ()
    server_args: dict[str, Any] = {}
    lease: dict[str, Any] | None = None
    cpu_attention: Attention = "torch"
    pair: Pair | None = None
    assumed: Assumed = ()


#: Keys that have one type in every header that says them.
KEYS_READ = frozenset(_HeaderFacts.model_fields)


def _read(header: dict[str, Any]) -> dict[str, Any]:
    try:
        validated(header, _HeaderFacts)
    except BadDocument as error:
        raise ValueError(str(error)) from error
    return header


#: A header as a field of a document: any keys, and those that are read in their types.
Header = Annotated[dict[str, Any], AfterValidator(_read)]


def contradiction(said: BaseModel, header: Mapping[str, Any]) -> str:
    """Where a manifest says another engine than the one that reported this header; empty where they agree.

    said: what in the manifest is of the engine.

    The files of a commit need not know the release that they run in the environment of.
    """
    if not header or header.get("tree") or getattr(said, "release", None) is None:
        return ""
    for key in SAME:
        if hasattr(said, key) and key in header and getattr(said, key) != header[key]:
            return f"{key} is {getattr(said, key)!r}, and the engine itself reported {header[key]!r}"
    return ""
