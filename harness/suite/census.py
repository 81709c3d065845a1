"""Counts planned against reported tests: neither pytest nor xdist says so when some were never run, or run twice.

It must not decide which tests run; it only refuses to call an incomplete session complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: Exit of a session that is not complete: none of pytest's own (0 to 5), so that a gate can tell it from a failure.
INCOMPLETE = 16
#: Names shown in full before "and N more".
SHOWN = 5


@dataclass(slots=True)
class Census:
    """Fed by the controller: `plan` from every worker (they collect the same), `report` at the end of each test."""

    planned: Counter[str] = field(default_factory=Counter)
    reported: Counter[str] = field(default_factory=Counter)

    def plan(self, ids: Iterable[str]) -> None:
        """What one worker collected; an id may be planned twice on purpose (--keep-duplicates)."""
        self.planned |= Counter(ids)

    def report(self, nodeid: str) -> None:
        self.reported[nodeid] += 1

    def faults(self) -> list[str]:
        """What is wrong with the session, in whole sentences; empty if every planned test was reported once."""
        missing = self.planned - self.reported
        strange = [name for name in self.reported if name not in self.planned]
        doubled = [name for name in self.reported - self.planned if name in self.planned]
        found = []
        if missing:
            found.append(
                f"incomplete: {_tests(list(missing.elements()))} planned and not reported, "
                f"of {self.planned.total()}: {_some(list(missing))}"
            )
        if doubled:
            found.append(f"incomplete: {_tests(doubled)} reported more than once: {_some(doubled)}")
        if strange:
            found.append(f"incomplete: {_tests(strange)} reported and never planned: {_some(strange)}")
        return found


def _tests(names: Sequence[str]) -> str:
    return f"{len(names)} {'test was' if len(names) == 1 else 'tests were'}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
