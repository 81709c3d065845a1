"""Records that all packages share: row keys, divergences and verdicts.

This module must not import torch, sglang or any other room: it is the vocabulary, not the behaviour. What goes in is
in `harness.contract.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Which forward or decision a row belongs to, in the order they happen to one request."""

    PREFILL = "PREFILL"  # target over prompt rows (one chunk)
    DRAFT_PREFILL = "DRAFT_PREFILL"  # draft over the same chunk, tokens rotated left by one
    DRAFT = "DRAFT"  # draft forward `step` of a round
    VERIFY = "VERIFY"  # target over the draft tree
    ACCEPT = "ACCEPT"  # the walk: one row per committed token
    EXTEND = "EXTEND"  # draft over the tokens the verify committed
    IDLE = "IDLE"  # a rank without requests entering a stage
    PREBUILT = "PREBUILT"  # decode-side batch whose prefill ran elsewhere


#: Forwards of the target.
TARGET = (Phase.PREFILL, Phase.VERIFY)
#: Those of the draft over the rows that the target's forward before them had.
EXTENDING = (Phase.DRAFT_PREFILL, Phase.EXTEND)
#: All of the draft's.
DRAFTING = (Phase.DRAFT_PREFILL, Phase.DRAFT, Phase.EXTEND)
#: Row j of these stands at committed + j.
RUNNING = (Phase.PREFILL, *EXTENDING)
#: `step` of their rows is the layer of a draft with several, each of which keeps KV of its own.
LAYERED = (*EXTENDING, Phase.PREBUILT)


class Kind(StrEnum):
    """What is wrong. Stable: gates and known-failure files read these words."""

    TOKEN = "TOKEN"
    POSITION = "POSITION"
    PARENT = "PARENT"
    ACCEPT = "ACCEPT"
    EXTEND_INPUT = "EXTEND_INPUT"
    CACHE_SLOT = "CACHE_SLOT"
    NUMERIC = "NUMERIC"
    STATE = "STATE"
    SHAPE = "SHAPE"
    MISSING_ROW = "MISSING_ROW"
    EXTRA_ROW = "EXTRA_ROW"
    LOCKSTEP = "LOCKSTEP"
    LEAK = "LEAK"
    CRASH = "CRASH"
    HANG = "HANG"
    NONDETERMINISM = "NONDETERMINISM"


class Outcome(StrEnum):
    """Three-valued judgement; merged by priority FAIL > UNKNOWN > PASS."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


class Policy(StrEnum):
    """How a value was compared. There is no fourth."""

    EXACT = "EXACT"
    TIE = "TIE"
    BUDGET = "BUDGET"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """What two rows must share to be compared: meaning, never order of arrival."""

    dp_rank: int
    rid: str
    attempt: int
    committed: int
    phase: str
    step: int
    slot: int

    @staticmethod
    def of(share: tuple[int, str, int, int], phase: str, *, step: int = 0, slot: int = 0) -> Key:
        """Of a request's share of a batch (see harness.contract.batches)."""
        dp_rank, rid, attempt, committed = share
        return Key(dp_rank=dp_rank, rid=rid, attempt=attempt, committed=committed, phase=phase, step=step, slot=slot)

    @staticmethod
    def of_rank(dp_rank: int, phase: str, *, step: int = 0) -> Key:
        """Of something that belongs to a rank, not to a request."""
        return Key(dp_rank=dp_rank, rid="", attempt=0, committed=-1, phase=phase, step=step, slot=0)

    @property
    def share(self) -> tuple[int, str, int, int]:
        """The request's share of a batch that it belongs to."""
        return (self.dp_rank, self.rid, self.attempt, self.committed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One disagreement between engine and reference (or engine and invariant). check: id of the check that found it."""

    kind: Kind
    key: Key
    round: int
    expected: Any
    observed: Any
    check: str = ""
    policy: Policy = Policy.EXACT
    margin: float | None = None
    hint: str = ""
    first: bool = False
    #: signature of the earlier divergence that explains this one; empty for a root
    cause: str = ""

    @property
    def signature(self) -> str:
        """Failure identity: the same defect in another request or round has the same signature."""
        return f"{self.kind}:{self.check}:{self.key.phase}:{self.hint or 'any'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Judgement of one scenario or one run."""

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    #: coverage point -> times it happened, and positions compared where it did
    coverage: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    ties: int = 0
    #: kinds of every divergence, and of those that nothing earlier explains
    kinds: tuple[str, ...] = ()
    root_kinds: tuple[str, ...] = ()

    @staticmethod
    def merge(outcomes: list[Outcome]) -> Outcome:
        """FAIL > UNKNOWN > PASS; an empty list is UNKNOWN, since nothing to compare is never a pass."""
        if Outcome.FAIL in outcomes:
            return Outcome.FAIL
        if not outcomes or Outcome.UNKNOWN in outcomes:
            return Outcome.UNKNOWN
        return Outcome.PASS
