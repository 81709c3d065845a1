"""What one night is on disk: plan.json (first), reproducers, night.json (last). Extra keys are refused.

Records, and which cells of a plan are not in a result. This module must not read files and must not judge.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from harness.contract.types import Outcome
from harness.contract.words import some

SCHEMA: Literal[1] = 1
Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Seen(_Strict):
    """One finding that nothing earlier explains, in one cell.

    scenarios: how many of the cell show it. shown, tried: how often the first of them did, of so many times driven.
    first: the first divergence of the smallest in words. reproducer: that one, relative to the night.
    """

    signature: str
    scenarios: Annotated[int, Field(ge=1)]
    divergences: Annotated[int, Field(ge=1)]
    shown: Annotated[int, Field(ge=1)]
    tried: Annotated[int, Field(ge=1)]
    first: str
    reproducer: Annotated[str | None, Field(validation_alias=AliasChoices("reproducer", "specimen"))]

    @property
    def kind(self) -> str:
        return self.signature.partition(":")[0]


class CellResult(_Strict):
    """One cell that ran.

    expected: PASS, or what a corpus case's release window says. expected_kinds: what its case shows here.
    unknown: scenarios without a verdict; left_out: those that the time limit left no time for. accepted: accept length
    (bonus included) -> verifies. accept: verifies of which the expected length is known, tokens that they were expected
    to commit, tokens that they did. boots: engines that were started for it; waited: the share of its seconds in which
    it had none. choices: tokens and proposals that were compared; ties: those within the margin.
    board: of mutants of the source, as `eaglecheck mutate --json` writes it.
    """

    key: str
    engine: str
    kind: Literal["case", "fixed", "generated", "mutated"]
    name: str
    expected: Literal["PASS", "FAIL", "unknown"]
    expected_kinds: Annotated[tuple[str, ...], Field(validation_alias=AliasChoices("expected_kinds", "foretold"))]
    verdict: Outcome
    reasons: tuple[str, ...]
    scenarios: Count
    failed: Count
    unknown: Count
    left_out: Count
    findings: tuple[Seen, ...]
    accepted: dict[int, Count]
    accept: tuple[Count, Count, Count] = (0, 0, 0)
    ties: Count
    choices: Count
    seconds: Annotated[float, Field(ge=0.0)]
    boots: Count = 0
    waited: Annotated[float, Field(ge=0.0)] = 0.0
    board: dict[str, Any] | None = None

    @property
    def drawn(self) -> bool:
        """Whether another seed asks something else, so that what does not show proves nothing."""
        return self.kind in ("generated", "mutated")

    @property
    def mean_accepted(self) -> float | None:
        """Mean accept length, None without a verify."""
        total = sum(self.accepted.values())
        return sum(length * count for length, count in self.accepted.items()) / total if total else None

    @property
    def lost(self) -> float | None:
        """Percent of the expected accept length that was not observed; None where it is not known."""
        _, expected, observed = self.accept
        return 100.0 * (expected - observed) / expected if expected else None

    @property
    def tie_rate(self) -> float | None:
        return self.ties / self.choices if self.choices else None


class NightPlan(_Strict):
    """What a night, or one shard of it, sets out to do. planned: cell keys of the whole night, in order.

    costs: about how many seconds each of them takes. not_planned: what was asked for and cannot be had, and why.
    settings: what the command asked of every boot, by SGLang's names (cuda_graph, dtype). seconds, scenarios: limits of
    each family's generated scenarios. shard: (number, of how many). source: digest of our own files; it, settings and
    costs are empty in a night of an earlier version. jobs: processes side by side that drove it, or its last part where
    it was cut off; all of its shards together. shards: ids of those that a whole night was put together from; empty
    where it ran in one.
    """

    schema_version: Literal[1] = SCHEMA
    id: str
    created: str
    device: str
    revert: int | None
    settings: dict[str, Any] = {}
    seed: int
    seconds: float
    scenarios: int
    repeats: int
    shard: tuple[int, int]
    jobs: Annotated[int, Field(ge=1)] = 1
    planned: Annotated[tuple[str, ...], Field(min_length=1)]
    costs: tuple[Count, ...] = ()
    not_planned: tuple[str, ...] = ()
    eaglecheck: str
    git_head: str
    source: str = ""
    host: str
    shards: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """'on cpu with #25015 reverted, page_size 4, seed 7': a night of another kind must never read like this one."""
        asked = [f"{name} {json.dumps(value)}" for name, value in self.settings.items()]
        return ", ".join([f"on {self.device}{self.taken_out}", *asked, f"seed {self.seed}"])

    @property
    def kind(self) -> dict[str, Any]:
        """Nights of one kind are compared with each other."""
        return {"device": self.device, "revert": self.revert, **self.settings}

    def differs(self, other: NightPlan) -> str:
        """'cuda_graph (there none, here true)': by what the other one is of another kind; empty where it is not."""
        here, there = self.kind, other.kind
        names = (name for name in {**here, **there} if here.get(name) != there.get(name))
        return ", ".join(f"{name} (there {_said(there.get(name))}, here {_said(here.get(name))})" for name in names)

    @property
    def cut_off(self) -> str:
        """What is said where it has no result."""
        return (
            f"({self.id} on {self.host}) never finished: it was killed, or could not write; "
            f"to drive the rest, type its command again with --resume {self.id}"
        )

    @property
    def taken_out(self) -> str:
        """What is said behind a release's name; empty unless a pull request is reverted."""
        return f" with #{self.revert} reverted" if self.revert else ""

    @property
    def mine(self) -> tuple[str, ...]:
        """The cells of this shard."""
        return self.share(*self.shard)

    def share(self, number: int, of: int) -> tuple[str, ...]:
        """The cells of one shard of so many: neighbours, which share a release, for about as long as other shards last.

        One that is longer than a whole share leaves another without a cell.
        """
        if not self.costs:
            return self.planned[number - 1 :: of]
        ends = [*accumulate(self.costs)]
        middles = (end - cost / 2 for end, cost in zip(ends, self.costs, strict=True))
        return tuple(
            key for key, at in zip(self.planned, middles, strict=True) if int(at * of / ends[-1]) == number - 1
        )


def _said(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


class Judged(_Strict):
    """What was said of a night when it was over; a shard alone is not judged."""

    outcome: Outcome
    reasons: tuple[str, ...]


class Night(_Strict):
    """A whole night. faults: why it is not all that was planned."""

    schema_version: Literal[1] = SCHEMA
    plan: NightPlan
    finished: str
    cells: tuple[CellResult, ...]
    faults: tuple[str, ...] = ()
    judged: Judged | None = None

    @property
    def green(self) -> bool:
        """Only a green night is ever compared with."""
        return self.judged is not None and self.judged.outcome is Outcome.PASS and not self.faults

    def cell(self, key: str) -> CellResult | None:
        return next((one for one in self.cells if one.key == key), None)


def signatures(cells: Iterable[CellResult]) -> dict[tuple[str, str], list[tuple[CellResult, Seen]]]:
    """(signature, engine) -> where it was seen, in the order first seen."""
    found: dict[tuple[str, str], list[tuple[CellResult, Seen]]] = {}
    for cell in cells:
        for seen in cell.findings:
            found.setdefault((seen.signature, cell.engine), []).append((cell, seen))
    return found


def first_seen(nights: Sequence[Night], *, release: str, device: str, revert: int | None) -> dict[str, str]:
    """Signature -> the first of these nights, oldest first, that saw it on the release."""
    found: dict[str, str] = {}
    for night in nights:
        if (night.plan.device, night.plan.revert) == (device, revert):
            for signature, engine in signatures(night.cells):
                if engine == release:
                    found.setdefault(signature, night.plan.id)
    return found


#: Cells named in one sentence.
SHOWN = 5


def unaccounted(planned: Sequence[str], reported: Sequence[str], *, excused: Collection[str] = ()) -> list[str]:
    """Sentences about cells that are missing, there twice or not of this night. excused: missing, and said already."""
    counts = Counter(reported)
    found = []
    for what, keys in (
        ("planned and not reported", [key for key in planned if not counts[key] and key not in excused]),
        ("reported more than once", [key for key, count in counts.items() if count > 1]),
        ("reported and not planned", [key for key in counts if key not in planned]),
    ):
        if keys:
            were = "cell was" if len(keys) == 1 else "cells were"
            found.append(f"{len(keys)} {were} {what}: {some(keys, SHOWN)}")
    return found
