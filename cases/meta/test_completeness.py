"""Planned against reported tests."""

import pytest

from harness.suite.completeness import INCOMPLETE, Completeness


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
    completeness = Completeness()
    for ids in planned:
        completeness.plan(ids)
    for name in reported:
        completeness.report(name)
    assert completeness.faults() == faults


def test_an_incomplete_session_has_an_exit_code_of_its_own():
    assert INCOMPLETE not in set(pytest.ExitCode)
