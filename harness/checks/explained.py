"""Roots that one known issue explains are one finding: a reference that follows the issue has none of them.

The reference's trace says which, in an event an issue, so that a run judged again from its folder says the same. This
module must not judge: what is explained is wrong all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace

from harness.contract.trace import Event, Trace
from harness.contract.types import Divergence

EXPLAINS = "explains"
#: Where a divergence is, and its kind.
Spot = tuple[object, ...]


def spot(found: Divergence) -> Spot:
    return (*astuple(found.key), str(found.kind))


def event(issue: str, gone: Iterable[Divergence]) -> Event:
    """What the reference's trace keeps of an issue. gone: the roots that a reference which follows it does not have."""
    return Event(name=EXPLAINS, scheduler_step=0, data={"finding": issue, "spots": [list(spot(one)) for one in gone]})


def explained(reference: Trace | None) -> dict[str, frozenset[Spot]]:
    """Id of an issue -> the places of what it explains."""
    events = [] if reference is None else list(reference.named(EXPLAINS))
    return {one.data["finding"]: frozenset(map(tuple, one.data["spots"])) for one in events}


def together(ordered: Sequence[Divergence], groups: Iterable[frozenset[Spot]]) -> list[Divergence]:
    """Divergences with their causes, where all roots of a group, and what follows from them, follow from its first."""
    found, moved = list(ordered), dict[str, str]()
    for group in groups:
        mine = [at for at, one in enumerate(found) if not one.cause and spot(one) in group]
        first = found[mine[0]].signature if mine else ""
        for at in mine:
            if found[at].signature != first:
                moved[found[at].signature] = first
                found[at] = replace(found[at], cause=first)
    left = {one.signature for one in found if not one.cause}
    return [replace(one, cause=moved[one.cause]) if one.cause in moved.keys() - left else one for one in found]
