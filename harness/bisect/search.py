"""The search itself: an ordered line of versions, bad at one end and good at the other, and a judge of three words.

A version that cannot be judged is passed over and its nearest neighbour tried, so the answer may be a range, and then
says so. It must not know how a version is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from harness.contract.usage import UserError

Call = Literal["bad", "good", "unknown"]
#: broken: the older end is good, so the search is for the first bad one. fixed: the other way round.
Direction = Literal["broken", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One version and what became of it.

    tries, failures: runs with a verdict, and those that showed the failure. cached: how many of the runs were of
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


class Line(Protocol):
    """Versions in order of age, from the older end to the newer one. over: what they are, in one word."""

    over: ClassVar[str]

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def old(self) -> str: ...

    @property
    def new(self) -> str: ...

    def middle_first(self, olds: Sequence[str], new: str) -> list[str]:
        """The versions after all of `olds` and before `new`, the one that halves them best first."""

    def between(self, olds: Sequence[str], new: str) -> tuple[str, tuple[str, ...]]:
        """(the one of `olds` nearest to `new`, the versions between them, oldest first)."""

    def label(self, name: str) -> str:
        """A version as people write it."""

    def title(self, name: str) -> str:
        """What it says of itself, empty for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """The line of published releases, oldest first, two or more."""

    over: ClassVar[str] = "releases"
    names: tuple[str, ...]

    @property
    def old(self) -> str:
        return self.names[0]

    @property
    def new(self) -> str:
        return self.names[-1]

    def middle_first(self, olds: Sequence[str], new: str) -> list[str]:
        low, high = max(map(self.names.index, olds)), self.names.index(new)
        places = sorted(range(low + 1, high), key=lambda at: (abs(at - (low + high) / 2), at))
        return [self.names[at] for at in places]

    def between(self, olds: Sequence[str], new: str) -> tuple[str, tuple[str, ...]]:
        low = max(map(self.names.index, olds))
        return self.names[low], self.names[low + 1 : self.names.index(new)]

    def label(self, name: str) -> str:
        return name

    def title(self, name: str) -> str:
        return ""


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


class NoAnswer(UserError):
    """The two ends are not what they were named for; `tried` is what is known of them."""

    def __init__(self, what: str, tried: Sequence[Tried]) -> None:
        super().__init__(what)
        self.tried = tuple(tried)


class NoChange(NoAnswer):
    """Both ends are bad, or both good, or each is the other's."""


class EndUnknown(NoAnswer):
    """One end cannot be judged, so there is nothing to search between."""

    exit_code = 3


Judge = Callable[[str], Tried]


def search(line: Line, judge: Judge, *, direction: Direction) -> Answer:
    """Find where the call changes along the line.

    Judges the bad end first. Every version is judged once at most: about log2 of their number, and one more for each
    unknown. Raises NoChange or EndUnknown when the ends are not what `direction` says.
    """
    tried = _ends(line, judge, direction)
    old_call = "good" if direction == "broken" else "bad"
    olds, new, unknown = [line.old], line.new, set[str]()
    while left := [name for name in line.middle_first(olds, new) if name not in unknown]:
        tried.append(judge(left[0]))
        if tried[-1].call == "unknown":
            unknown.add(left[0])
        elif tried[-1].call == old_call:
            olds.append(left[0])
        else:
            new = left[0]
    old, between = line.between(olds, new)
    return Answer(direction=direction, old=old, new=new, between=between, tried=tuple(tried))


def _ends(line: Line, judge: Judge, direction: Direction) -> list[Tried]:
    """Both ends judged, the bad one first; an exception unless they are what they were named for."""
    bad, good = (line.new, line.old) if direction == "broken" else (line.old, line.new)
    tried: list[Tried] = []
    for role, name in (("bad", bad), ("good", good)):
        tried.append(judge(name))
        if tried[-1].call == "unknown":
            raise EndUnknown(f"{line.label(name)}, the {role} end, cannot be judged: {tried[-1].why}", tried)
    calls = [one.call for one in tried]
    if calls[0] == calls[1]:
        both = "show the failure" if calls[0] == "bad" else "pass"
        raise NoChange(f"no change between {line.label(line.old)} and {line.label(line.new)}: both {both}", tried)
    if calls[0] == "good":
        names = f"{line.label(bad)} passes and {line.label(good)} shows the failure"
        raise NoChange(f"the ends are the wrong way round: {names}", tried)
    return tried
