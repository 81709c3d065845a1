"""Planned against reported tests."""

import pytest

from harness.suite.census import INCOMPLETE, Census


@pytest.mark.parametrize(
    ("planned", "reported", "faults"),
    [
        (["ab", "ab"], "ba", []),  # two workers collect the same
        (["abc"], "ac", ["incomplete: 1 test planned and not reported, of 3: b"]),
        (["ab"], "aab", ["incomplete: 1 test reported more than once: a"]),
        (["abcdefgh"], "a", ["incomplete: 7 tests planned and not reported, of 8: b, c, d, e, f and 2 more"]),
    ],
)
def test_what_was_planned_is_reported_once(planned, reported, faults):
    census = Census()
    for ids in planned:
        census.plan(ids)
    for name in reported:
        census.report(name)
    assert census.faults() == faults


def test_an_incomplete_session_has_an_exit_code_of_its_own():
    assert INCOMPLETE not in set(pytest.ExitCode)
