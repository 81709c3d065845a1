"""The search itself: a line of versions, oldest first, bad at one end and good at the other, and judges of three words.

A version that cannot be judged is passed over and its nearest neighbour tried, so the answer may be a range, and then
says so. It must not know what a version is or how one is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Call = Literal["bad", "good", "unknown"]
#: broken: the older end is good, so the search is for the first bad one. fixed: the other way round.
Direction = Literal["broken", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One version and what became of it.

    tries, failures: runs that say something, and those that showed the failure. cached: how many of the runs were of
    earlier searches. risk: the greatest probability that a `good` is wrong, for a failure that comes and goes.
    """

    name: str
    call: Call
    why: str
    tries: int = 1
    failures: int = 0
    cached: int = 0
    risk: float = 0.0
    seconds: float = 0.0
    run: str | None = None
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The two neighbours between which the call changes, and everything tried, in that order.

    between: versions from old to new that lie between the two and could not be judged; empty for an exact answer.
    """

    direction: Direction
    old: str
    new: str
    between: tuple[str, ...]
    tried: tuple[Tried, ...]

    @property
    def exact(self) -> bool:
        return not self.between

    @property
    def first_bad(self) -> str | None:
        """The oldest bad one found; with `between`, one of those may be the first."""
        return self.new if self.direction == "broken" else None

    @property
    def last_good(self) -> str | None:
        return self.old if self.direction == "broken" else None

    @property
    def first_good(self) -> str | None:
        return self.new if self.direction == "fixed" else None

    @property
    def last_bad(self) -> str | None:
        return self.old if self.direction == "fixed" else None

    @property
    def risk(self) -> float:
        """Bound on the probability that a `good` call of this search is wrong, so that the answer may be."""
        return min(1.0, sum(one.risk for one in self.tried if one.call == "good"))


class NoAnswer(Exception):
    """The two ends do not say what they were named for; `tried` is what is known of them."""

    def __init__(self, what: str, tried: Sequence[Tried]) -> None:
        super().__init__(what)
        self.tried = tuple(tried)


class NoChange(NoAnswer):
    """Both ends are bad, or both good, or each is the other's."""


class EndUnknown(NoAnswer):
    """One end cannot be judged, so there is nothing to search between."""


Judge = Callable[[str], Tried]


@dataclass(slots=True)
class _Search:
    names: Sequence[str]
    judge: Judge
    tried: list[Tried] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)

    def ask(self, at: int) -> Call:
        found = self.judge(self.names[at])
        self.tried.append(found)
        if found.call == "unknown":
            self.unknown.add(at)
        return found.call


def search(names: Sequence[str], judge: Judge, *, direction: Direction) -> Answer:
    """Find where the call changes along `names` (two or more, oldest first, ends of different calls).

    Judges the bad end first. Every version is judged once at most: about log2 of their number, and one more for each
    unknown. Raises NoChange or EndUnknown when the ends are not what `direction` says.
    """
    state = _Search(names, judge)
    low, high = 0, len(names) - 1
    old_call: Call = "good" if direction == "broken" else "bad"
    _check_ends(state, direction)
    while (at := _next(low, high, state.unknown)) is not None:
        call = state.ask(at)
        if call == old_call:
            low = at
        elif call != "unknown":
            high = at
    return Answer(
        direction=direction,
        old=names[low],
        new=names[high],
        between=tuple(names[low + 1 : high]),
        tried=tuple(state.tried),
    )


def _check_ends(state: _Search, direction: Direction) -> None:
    bad, good = (len(state.names) - 1, 0) if direction == "broken" else (0, len(state.names) - 1)
    calls: dict[str, Call] = {}
    for role, at in (("bad", bad), ("good", good)):
        call = calls[role] = state.ask(at)
        if call == "unknown":
            why = state.tried[-1].why
            raise EndUnknown(f"{state.names[at]}, the {role} end, cannot be judged: {why}", state.tried)
    if calls["bad"] == calls["good"]:
        word = {"bad": "show the failure", "good": "pass"}[calls["bad"]]
        raise NoChange(f"no change between {state.names[0]} and {state.names[-1]}: both {word}", state.tried)
    if calls["bad"] == "good":
        raise NoChange(
            f"the ends are the wrong way round: {state.names[bad]} passes and {state.names[good]} shows the failure",
            state.tried,
        )


def _next(low: int, high: int, unknown: set[int]) -> int | None:
    """The untried version nearest to the middle between the two ends; None when none is left."""
    middle = (low + high) / 2
    left = [at for at in range(low + 1, high) if at not in unknown]
    return min(left, key=lambda at: (abs(at - middle), at), default=None)
