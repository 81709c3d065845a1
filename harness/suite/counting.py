"""The counting of what was reported against what was planned, on the process that sees every report.

It must not change the outcome of a test: it only says that some are missing.
"""

from __future__ import annotations

import pytest

from harness.suite.census import INCOMPLETE, Census

CENSUS = pytest.StashKey[Census]()


class Counting:
    """Registered on the controller alone: a worker sees only its own reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed += report.failed
        if report.when in ("teardown", "???"):  # xdist's word for a test whose worker died
            self._config.stash[CENSUS].report(report.nodeid)

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
            terminalreporter.write_line(f"this session proves nothing about those tests; {why}", red=True, bold=True)

    def _stopped_early(self) -> bool:
        """--maxfail and -x: tests are missing on purpose, and the failure that did it is the result."""
        most = self._config.option.maxfail
        return bool(most) and self._failed >= most

    def _faults(self) -> list[str]:
        return [] if self._config.option.collectonly else self._config.stash[CENSUS].faults()
