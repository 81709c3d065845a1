"""Counts planned against reported tests: neither pytest nor xdist says so when some were never run.

It must not decide which tests run; it only refuses to call an incomplete session complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: Names shown in full before "and N more".
SHOWN = 5


@dataclass(slots=True)
class Census:
    """Fed by the controller: `plan` from every worker (they collect the same), `report` at the end of each test."""

    planned: dict[str, None] = field(default_factory=dict)
    reported: Counter[str] = field(default_factory=Counter)

    def plan(self, ids: Iterable[str]) -> None:
        self.planned.update(dict.fromkeys(ids))

    def report(self, nodeid: str) -> None:
        self.reported[nodeid] += 1

    def faults(self) -> list[str]:
        """What is wrong with the session, in whole sentences; empty if every planned test was reported once."""
        missing = [name for name in self.planned if name not in self.reported]
        doubled = [name for name, count in self.reported.items() if count > 1]
        found = []
        if missing:
            found.append(f"incomplete: {_tests(missing)} planned and not reported: {_some(missing)}")
        if doubled:
            found.append(f"incomplete: {_tests(doubled)} reported more than once: {_some(doubled)}")
        return found


def _tests(names: Sequence[str]) -> str:
    return f"{len(names)} {'test was' if len(names) == 1 else 'tests were'}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
