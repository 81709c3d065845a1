"""Planned against reported tests."""

from harness.suite.census import Census


def _census(planned, reported):
    census = Census()
    for ids in planned:
        census.plan(ids)
    for name in reported:
        census.report(name)
    return census


def test_every_planned_test_reported_once_is_complete():
    assert _census(["ab", "ab"], "ba").faults() == []  # two workers collect the same


def test_missing_test_is_named():
    assert _census(["abc"], "ac").faults() == ["incomplete: 1 test planned and not reported, of 3: b"]


def test_doubled_test_is_named():
    assert _census(["ab"], "aab").faults() == ["incomplete: 1 test reported more than once: a"]


def test_many_missing_tests_are_counted_and_not_all_named():
    (error,) = _census(["abcdefgh"], "a").faults()
    assert error == "incomplete: 7 tests planned and not reported, of 8: b, c, d, e, f and 2 more"
