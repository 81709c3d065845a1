"""Judges a night against the nights before it and against what is known. Pure: no clock, no disk, no engine.

Red means FAIL (something new, unsteady, or not as a release window says, or a known entry that has expired) or UNKNOWN
(not all of it was seen). Only a green night is ever a baseline.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cases.known import Entry
from harness.contract.rates import interval
from harness.contract.types import Outcome
from harness.contract.words import brief
from harness.night.records import CellResult, Night, Seen, signatures, unaccounted
from harness.night.trends import Spread, Trend, trends

#: More of a generated cell's scenarios without a verdict than this, and the night is red; of a fixed one, any.
UNKNOWN_LIMIT = 0.05
#: A known finding that stays away over so many scenarios that this is how likely it is by chance counts as gone.
GONE = 0.01


class Status(StrEnum):
    """What a finding is, seen from the nights before."""

    NEW = "new"
    FLAKY = "flaky"
    KNOWN = "known"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One signature on one release. cells: where it was seen tonight, or last where it is fixed.

    shown, tried: the same scenario driven again, or, where that never varies, nights of fixed cells from the first one
    with it on. since: that night. why: what makes it known, or where it was last.
    """

    signature: str
    engine: str
    status: Status
    cells: tuple[str, ...]
    shown: int
    tried: int
    since: str
    why: str = ""
    first: str = ""
    reproducer: str | None = None

    @property
    def red(self) -> bool:
        """Whether it alone makes a night red."""
        return self.status in (Status.NEW, Status.FLAKY)

    @property
    def rate(self) -> tuple[float, float, float]:
        """(share, lower end, upper end): exact interval, see `harness.contract.rates`."""
        return (self.shown / self.tried, *interval(self.shown, self.tried))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All there is to say. groups: red ones first. incomplete, wrong: sentences that make it UNKNOWN, or FAIL."""

    night: Night
    outcome: Outcome
    groups: tuple[Group, ...]
    incomplete: tuple[str, ...]
    wrong: tuple[str, ...]
    trends: tuple[Trend, ...]
    baseline: str | None
    #: why there is no baseline; empty where there is one
    uncompared: str = ""

    def of(self, status: Status) -> list[Group]:
        return [group for group in self.groups if group.status is status]

    @property
    def moved(self) -> list[tuple[Trend, Spread]]:
        """Values that lie outside what green nights showed, and what those showed."""
        return [(one, one.before) for one in self.trends if one.moved and one.before is not None]

    @property
    def reasons(self) -> tuple[str, ...]:
        found = (f"{group.status}: {group.signature} on {group.engine}" for group in self.groups if group.red)
        return (*found, *self.wrong, *self.incomplete)


def judge(night: Night, *, past: Sequence[Night], known: Sequence[Entry], today: datetime.date) -> Judgement:
    """past: finished nights before this one, oldest first; those of another device, revert or settings are left out."""
    others = [one for one in past if one.green and night.plan.differs(one.plan)]
    past = [one for one in past if not night.plan.differs(one.plan)]
    green = [one for one in past if one.green]
    groups = [*_tonight(night, past, known), *_fixed(night, past)]
    incomplete = [*night.faults, *_missing(night), *_unknown(night)]
    wrong = [*_surprises(night), *_expired(known, today), *_gone(night, past, known)]
    bad = wrong or any(group.red for group in groups)
    return Judgement(
        night=night,
        outcome=Outcome.FAIL if bad else Outcome.UNKNOWN if incomplete else Outcome.PASS,
        groups=tuple(sorted(groups, key=lambda group: list(Status).index(group.status))),
        incomplete=tuple(incomplete),
        wrong=tuple(wrong),
        trends=tuple(trend for cell in night.cells for trend in trends(cell, green)),
        baseline=green[-1].plan.id if green else None,
        uncompared="" if green else _uncompared(night, others),
    )


def _uncompared(night: Night, others: Sequence[Night]) -> str:
    """others: green nights before it, of other kinds."""
    if not others:
        return "there is no green night yet"
    newest = others[-1].plan
    return (
        f"the newest green night before it, {newest.id}, is of another kind: it differs in {night.plan.differs(newest)}"
    )


def _place(cell: CellResult) -> str:
    return f"{cell.kind}/{cell.name}"


def _tonight(night: Night, past: Sequence[Night], known: Sequence[Entry]) -> list[Group]:
    """One group for what is known of a signature on a release, and one for the rest of it."""
    groups = []
    for (signature, engine), members in signatures(night.cells).items():
        by_cell = {cell.key: _known_by(cell, seen, known) for cell, seen in members}
        for why in dict.fromkeys(by_cell.values()):
            here = [(cell, seen) for cell, seen in members if by_cell[cell.key] == why]
            groups.append(_group(signature, engine, here, night, past, why))
    return groups


def _known_by(cell: CellResult, seen: Seen, known: Sequence[Entry]) -> str:
    if seen.kind in cell.expected_kinds:
        return f"corpus case {cell.name}, {'open' if cell.expected == 'unknown' else 'bad'} on {cell.engine}"
    entry = next((one for one in known if one.covers(seen.signature, engine=cell.engine, place=_place(cell))), None)
    return "" if entry is None else f"{entry.issue}, {entry.what}; expires {entry.expires}"


def _group(
    signature: str,
    engine: str,
    members: Sequence[tuple[CellResult, Seen]],
    night: Night,
    past: Sequence[Night],
    why: str,
) -> Group:
    keys = tuple(cell.key for cell, _ in members)
    shown, tried = sum(seen.shown for _, seen in members), sum(seen.tried for _, seen in members)
    nights = [had for one in past if (had := _had(one, signature, keys)) is not None]
    came = nights[nights.index(True) :] if True in nights else []
    if shown == tried and False in came and not any(cell.drawn for cell, _ in members):
        shown, tried = 1 + sum(came), 1 + len(came)
    status = Status.KNOWN if why else Status.FLAKY if shown < tried else Status.NEW
    since = next((one.plan.id for one in past if _had(one, signature, keys)), night.plan.id)
    smallest = members[0][1]
    return Group(
        signature=signature,
        engine=engine,
        status=status,
        cells=keys,
        shown=shown,
        tried=tried,
        since=since,
        why=why,
        first=smallest.first,
        reproducer=smallest.reproducer,
    )


def _had(night: Night, signature: str, keys: Sequence[str]) -> bool | None:
    """Whether a night showed a signature in one of these cells; None if it judged none of them."""
    cells = [cell for key in keys if (cell := night.cell(key)) is not None and cell.unknown < cell.scenarios]
    if not cells:
        return None
    return any(seen.signature == signature for cell in cells for seen in cell.findings)


def _fixed(night: Night, past: Sequence[Night]) -> list[Group]:
    """What the last night that ran the same fixed cells had and this one has not. Absence proves nothing elsewhere."""
    found = []
    for cell in night.cells:
        before = next((one for one in reversed(past) if one.cell(cell.key) is not None), None)
        had = None if before is None else before.cell(cell.key)
        if cell.drawn or cell.unknown or not cell.scenarios or before is None or had is None:
            continue
        now = {seen.signature for seen in cell.findings}
        found += [
            Group(
                signature=seen.signature,
                engine=cell.engine,
                status=Status.FIXED,
                cells=(cell.key,),
                shown=0,
                tried=1,
                since=before.plan.id,
                why=f"last seen in {before.plan.id}",
            )
            for seen in had.findings
            if seen.signature not in now
        ]
    return found


def _missing(night: Night) -> list[str]:
    """Cells that were planned and not reported, and the other way round; nothing where the merge said so already."""
    return [] if night.faults else unaccounted(night.plan.planned, [cell.key for cell in night.cells])


def _unknown(night: Night) -> list[str]:
    found = []
    for cell in night.cells:
        because = f": {brief(cell.reasons[0])}" if cell.reasons else ""
        if not cell.scenarios:
            found.append(f"nothing was driven in {cell.key}")
        elif cell.unknown > (UNKNOWN_LIMIT * cell.scenarios if cell.drawn else 0):
            found.append(f"{cell.unknown} of {cell.scenarios} scenarios of {cell.key} have no verdict{because}")
    return found


def _surprises(night: Night) -> list[str]:
    """A case that no longer fails where it must means that the release window is wrong, or that we no longer see it."""
    passing = [
        f"{cell.key} passes, and its release window says FAIL: is the gate still able to see it?"
        for cell in night.cells
        if cell.expected == "FAIL" and cell.verdict is Outcome.PASS
    ]
    nameless = [
        f"{cell.key} fails and names no finding"
        for cell in night.cells
        if cell.verdict is Outcome.FAIL and not cell.findings
    ]
    return passing + nameless


def _expired(known: Sequence[Entry], today: datetime.date) -> list[str]:
    return [
        f"known entry {one.issue} expired on {one.expires}: look again, then renew or remove it"
        for one in known
        if one.expires <= today
    ]


def _gone(night: Night, past: Sequence[Night], known: Sequence[Entry]) -> list[str]:
    """Entries whose cells ran tonight and before, over too many scenarios in a row without the finding."""
    found = []
    for entry in (one for one in known if night.plan.device in one.devices):
        away = driven = 0
        for one in (night, *reversed(past)):
            asked = [
                cell
                for cell in one.cells
                if entry.asked(engine=cell.engine, place=_place(cell)) and cell.scenarios > cell.unknown
            ]
            if any(entry.shown_by(seen.signature) for cell in asked for seen in cell.findings):
                break
            away += bool(asked)
            driven += sum(cell.scenarios - cell.unknown for cell in asked)
            if one is night and not asked:
                break
        if driven >= scenarios_until_gone(entry.rate):
            nights = "tonight" if away == 1 else f"in the last {away} nights"
            found.append(f"known entry {entry.issue} matches nothing {nights}: if it is fixed, remove it")
    return found


def scenarios_until_gone(rate: float) -> int:
    """So many scenarios without it, at this rate a scenario, are as unlikely as GONE."""
    return 1 if rate >= 1.0 else math.ceil(math.log(GONE) / math.log(1.0 - rate))
