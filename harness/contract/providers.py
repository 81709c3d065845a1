"""Who says what the rows of a model should hold: the names of providers, in headers and in words.

paper: our own modules, written from the papers. transformers: a target's module from Hugging Face. witness: the engine
itself in its plainest configuration. auto, where one is asked for: the first that knows the pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

AUTO, PAPER, TRANSFORMERS, WITNESS = "auto", "paper", "transformers", "witness"
#: What each is, where it judged both sides.
WHO = {PAPER: "our own modules", TRANSFORMERS: "Hugging Face's modules", WITNESS: "the same SGLang, plain"}
#: Key of a reference trace's header.
PROVIDERS = "providers"
#: How a line of a verdict begins that says who judged, and what nobody did.
JUDGED_BY, NOT_COMPARED = "judged by", "not compared"
#: What is said of a verdict of the witness.
LIMITS = (
    "judged by the witness: target and draft rows are those of the same SGLang in its plainest configuration; "
    "what is wrong there too is not seen"
)


def header_of(*, target: str, draft: str) -> dict[str, Any]:
    """As a reference trace's header says it."""
    return {PROVIDERS: {"target": target, "draft": draft}}


def providers_in(header: Mapping[str, Any]) -> dict[str, str]:
    """Who judged target and draft; traces that do not say were judged by the papers' own modules."""
    said = header.get(PROVIDERS) or {}
    return {side: str(said.get(side, PAPER)) for side in ("target", "draft")}


def is_witness(header: Mapping[str, Any]) -> bool:
    """Whether any of its rows are an engine's own."""
    return WITNESS in providers_in(header).values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """rows: phase -> (rows with a witness, rows that should have one). faults: why some have none."""

    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    requests: int = 0
    faults: Sequence[str] = ()

    @property
    def missing(self) -> tuple[int, int]:
        """(rows without a witness, rows that should have one)."""
        total = sum(of for _, of in self.rows.values())
        return total - sum(known for known, _ in self.rows.values()), total

    def plain(self) -> dict[str, Any]:
        """As a header has it."""
        rows = {phase: list(counts) for phase, counts in self.rows.items()}
        return {WITNESS: {"rows": rows, "requests": self.requests, "faults": list(self.faults)}}


def witnessed_in(header: Mapping[str, Any]) -> Witnessed:
    """What the header of a reference trace says of its witness; nothing where there was none."""
    said = header.get(WITNESS) or {}
    rows = {str(phase): (int(known), int(of)) for phase, (known, of) in (said.get("rows") or {}).items()}
    return Witnessed(rows=rows, requests=int(said.get("requests", 0)), faults=tuple(said.get("faults", ())))


def in_words(providers: Iterable[Mapping[str, str]]) -> str:
    """'paper (our own modules)', or 'transformers (target), paper (draft)'; several scenarios' together, each once."""
    texts = []
    for one in providers:
        said = dict.fromkeys(f"{name} ({WHO.get(name, name)})" for name in one.values())
        texts.append(
            next(iter(said)) if len(said) == 1 else ", ".join(f"{name} ({side})" for side, name in one.items())
        )
    return "; ".join(dict.fromkeys(texts))
