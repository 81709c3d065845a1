"""The registry of mutants: defects that can be put into a running engine, and what the checks must then report.

Both sides: standard library only. The entries are in mutants.toml; the sites and acts behind their words are in
`engine_side/mutants`, which runs inside the engine. It must not change anything by itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

#: Those that lie in what CUDA graphs of a round replay, and the phases that do.
REPLAYED = ("inputs", "plan", "choices", "candidates", "vocabulary", "forward")
ROUNDS = {"DRAFT", "EXTEND", "VERIFY"}
#: What a mutant may do to the output.
TEXTS = ("same", "differs")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mutant.

    site: one of SITES. phases: where it acts, () if none are meant. act: a function of `engine_side/mutants`; args are
    for it, and `tp_rank` among them lets it act on that TP rank alone. kinds: what may show it (words of
    harness.contract.types.Kind): killed means that one of these is reported. needs: one of NEEDS. text: what usually
    happens to the output; said, not judged.
    """

    id: str
    family: str
    what: str
    act: str
    kinds: tuple[str, ...]
    site: str = "inputs"
    phases: tuple[str, ...] = ()
    needs: str = "chain"
    text: str = "same"
    args: Mapping[str, Any]

    @property
    def replayed(self) -> bool:
        """Whether it acts in what CUDA graphs replay, where only those that the graphs hold can."""
        drafts = self.site in ("choices", "candidates", "vocabulary")
        return self.site in REPLAYED and set(self.phases) <= ROUNDS and bool(drafts or self.phases)


_KNOWN = {one.name for one in fields(Mutant)}


def _mutant(family: str, name: str, entry: dict[str, Any]) -> Mutant:
    own: dict[str, Any] = {}
    args: dict[str, Any] = {}
    for key, value in entry.items():
        if key in ("kinds", "phases"):
            own[key] = tuple(value.split())
        else:
            (own if key in _KNOWN else args)[key] = value
    return Mutant(id=name, family=family, args=args, **own)


_FAMILIES = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))
_WORDS: dict[str, dict[str, str]] = _FAMILIES.pop("words")
#: Where a mutant can act, and what a scenario must have for it to show: word -> meaning.
SITES, NEEDS = _WORDS["sites"], _WORDS["needs"]
#: Every mutant by id, in the order of the file.
MUTANTS: dict[str, Mutant] = {
    name: _mutant(family, name, entry) for family, entries in _FAMILIES.items() for name, entry in entries.items()
}
