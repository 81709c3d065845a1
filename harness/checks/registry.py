"""The registry of checks, and what a check returns.

A check has an `id`. It stands in signatures (`KIND:id:PHASE:hint`), so stored runs and known issues are found by it: it
never changes. Module and function are named by what the check is about, and may.

A check is a pure function of `Evidence`. This module must not judge: it registers, and turns a crash inside a check
into a reason for UNKNOWN so that one broken check never hides another's findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from harness.checks.evidence import Evidence
from harness.contract.types import Divergence, Key, Kind

#: What verdicts count. A check may add only to these.
COMPARED = (
    "positions",
    "tokens",
    "proposals",
    "accepts",
    "extend_inputs",
    "cache_slots",
    "slots_read",
    "parents",
    "hidden_rows",
    "logits",
    "counts",
)

#: What they count beside that where several ranks run in step, and where requests or settings of the engine ask for it.
ALSO_COMPARED = (
    *("idle_states", "token_counts", "tp_rows"),
    *("masks", "logprobs", "returned_states", "window_slots", "recurrent_states", "host_rows"),
)

#: What a check may read.
SOURCES = ("scenario", "engine", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A token choice accepted although it differs: the reference margin was below the limit."""

    key: Key
    round: int
    expected: int
    observed: int
    margin: float
    limit: float


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """What one check found. compared: how many values of each sort it really looked at."""

    divergences: list[Divergence] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    ties: list[Tie] = field(default_factory=list)
    #: token choices that could have been ties
    choices: int = 0
    #: hidden rows that agree, but within so much rounding that it says nothing
    indistinct: int = 0
    #: each makes the verdict UNKNOWN
    unknown: list[str] = field(default_factory=list)
    #: said in the verdict, without changing it
    notes: list[str] = field(default_factory=list)

    def count(self, name: str, amount: int) -> None:
        """Add to a compared counter; nothing is added for nothing, so a counter that exists is above zero."""
        allowed = (*COMPARED, *ALSO_COMPARED)
        if name not in allowed:
            raise KeyError(f"unknown counter {name!r}; allowed: {', '.join(allowed)}")
        if amount:
            self.compared[name] = self.compared.get(name, 0) + amount

    def decide(self, found: Divergence, *, limit: float) -> bool:
        """Whether a choice that differs was a tie: its margin is below `limit`. If not, it is a divergence."""
        margin = math.inf if found.margin is None else found.margin
        if not margin < limit:
            self.divergences.append(found)
            return False
        expected, observed = found.expected, found.observed
        self.ties.append(
            Tie(key=found.key, round=found.round, expected=expected, observed=observed, margin=margin, limit=limit)
        )
        return True

    def add(self, *others: CheckResult) -> None:
        """Take over everything that others say."""
        for other in others:
            self.divergences += other.divergences
            self.ties += other.ties
            self.choices += other.choices
            self.indistinct += other.indistinct
            self.unknown += other.unknown
            self.notes += other.notes
            for name, amount in other.compared.items():
                self.count(name, amount)


Judge = Callable[[Evidence], CheckResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A registered check: id, kinds it may raise, sources it reads, and the function, which says what it protects."""

    id: str
    kinds: frozenset[Kind]
    reads: tuple[str, ...]
    judge: Judge

    @property
    def needs_reference(self) -> bool:
        """Whether it can say nothing without a reference trace."""
        return "reference" in self.reads


#: Every check by id.
CHECKS: dict[str, Check] = {}


def register(*, id: str, kinds: tuple[Kind, ...], reads: tuple[str, ...]) -> Callable[[Judge], Judge]:
    """Decorator: put a check on the list. Its docstring begins with what it protects. Refuses doubles."""
    if id in CHECKS:
        raise ValueError(f"check {id!r} is registered twice")
    if not id.isidentifier() or not kinds:
        raise ValueError(f"check {id!r} needs an identifier and at least one kind")
    foreign = sorted(set(reads) - set(SOURCES))
    if foreign or not reads:
        raise ValueError(f"check {id!r} reads {foreign or 'nothing'}; allowed: {', '.join(SOURCES)}")

    def keep(judge: Judge) -> Judge:
        CHECKS[id] = Check(id=id, kinds=frozenset(kinds), reads=reads, judge=judge)
        return judge

    return keep


def run_check(check: Check, evidence: Evidence) -> CheckResult:
    """Run one check and put its id into what it found; a crash or an undeclared kind is a reason for UNKNOWN."""
    if check.needs_reference and evidence.reference is None:
        return CheckResult(notes=[f"check {check.id!r} not run: there is no reference trace"])
    try:
        result = check.judge(evidence)
    except Exception as error:  # reported, never dropped
        return CheckResult(unknown=[f"check {check.id!r} crashed: {type(error).__name__}: {error}"])
    result.divergences = [replace(found, check=check.id) for found in result.divergences]
    undeclared = sorted({str(found.kind) for found in result.divergences} - {str(kind) for kind in check.kinds})
    if undeclared:
        result.unknown.append(f"check {check.id!r} raised kinds it does not declare: {', '.join(undeclared)}")
    return result
