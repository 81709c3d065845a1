"""Compares planned with reported tests: pytest and xdist do not notice lost or repeated ones.

It must not change the outcome of a test; it only refuses to call an incomplete session complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from harness.contract.words import counted, some

#: Exit of a session that is not complete: none of pytest's own (0 to 5), so that a gate can tell it from a failure.
INCOMPLETE = 16
#: Names shown in full before "and N more".
SHOWN = 5


@dataclass(slots=True)
class Completeness:
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
        again = self.reported - self.planned
        kinds = (
            (list((self.planned - self.reported).elements()), f"planned and not reported, of {self.planned.total()}"),
            ([name for name in again if name in self.planned], "reported more than once"),
            ([name for name in again if name not in self.planned], "reported and never planned"),
        )
        return [
            f"incomplete: {counted(len(names), 'test')} {what}: {some([*dict.fromkeys(names)], SHOWN)}"
            for names, what in kinds
            if names
        ]


COMPLETENESS = pytest.StashKey[Completeness]()


class Counting:
    """Registered on the controller alone: a worker sees only its own reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed += report.failed
        if report.when in ("teardown", "???"):  # xdist's word for a test whose worker died
            self._config.stash[COMPLETENESS].report(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        complete = not self._faults() or self._stopped_early()
        if not complete and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = INCOMPLETE

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for fault in self._faults():
            terminalreporter.write_line(fault, red=True, bold=True)
        if self._faults():
            why = "stopped early, as asked (--maxfail)" if self._stopped_early() else f"exit {INCOMPLETE}"
            terminalreporter.write_line(f"this session says nothing about those tests; {why}", red=True, bold=True)

    def _stopped_early(self) -> bool:
        """--maxfail and -x: tests are missing on purpose, and the failure that did it is the result."""
        most = self._config.option.maxfail
        return bool(most) and self._failed >= most

    def _faults(self) -> list[str]:
        return [] if self._config.option.collectonly else self._config.stash[COMPLETENESS].faults()
