"""The corpus as data: every entry can be read and run, its windows say what is expected, and errors are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.version import Version

from cases import catalogue
from cases.catalogue import CaseError
from harness.cli import prepare, scenario_checks
from harness.contract import known_issues
from harness.contract.scenario import Scenario
from harness.contract.types import Kind, Outcome
from harness.engines.envs import SUPPORTED

NAMES = catalogue.names()


@pytest.mark.parametrize("name", NAMES)
def test_every_case_can_be_read_run_and_distinguished(name):
    case = catalogue.load(name)
    assert case.id == case.scenario.name == name
    assert set(case.kinds) <= set(Kind)
    assert case.revert is None or case.revert in prepare.REVERTS
    scenario_checks.check_scenarios([case.scenario], device="cpu")
    assert case.assumes == known_issues.checked(case.assumes)
    assert known_issues.without_effect(case.assumes, [(case.scenario.spec, case.scenario.engine)]) == []


@pytest.mark.parametrize("name", NAMES)
def test_windows_are_ordered_and_say_pass_fail_or_unknown(name):
    case = catalogue.load(name)
    expected_by_release = [case.expected(release=release, revert=None) for release in SUPPORTED]
    if case.bad_from is not None:
        before = [release for release in SUPPORTED if Version(release) < Version(case.bad_from)]
        assert before or case.finding, "leave bad_from out where the oldest release has the bug"
        assert expected_by_release[: len(before)] == ["unknown"] * len(before)
        expected_by_release = expected_by_release[len(before) :]
    order = ["FAIL", "unknown", "PASS"]
    assert expected_by_release == sorted(expected_by_release, key=order.index)
    assert case.expected(release=case.bad_up_to, revert=None) == "FAIL"
    if case.good_from is not None:
        assert case.expected(release=case.good_from, revert=None) == "PASS"


def test_a_reverted_fix_fails_its_own_case_and_no_other():
    case = catalogue.load("pr25015")
    assert case.expected(release="0.5.23", revert=25015) == "FAIL"
    assert case.expected(release="0.5.23", revert=26329) == "PASS"


def test_where_a_case_was_not_seen_its_window_expects_no_failure():
    """On a GPU another arithmetic accepts other tokens, so that a failure of the CPU's may not be there."""
    case = catalogue.load("stop-past-length")
    assert [case.expected(release="0.5.13", revert=None, device=one) for one in ("cpu", "cuda")] == ["FAIL", "unknown"]
    assert [case.expected(release="0.5.23", revert=None, device=one) for one in ("cpu", "cuda")] == ["PASS", "PASS"]
    assert catalogue.load("pr25015").expected(release="0.5.11", revert=None, device="cuda") == "FAIL"


def test_between_the_ends_of_its_window_a_case_expects_nothing():
    case = catalogue.load("pr25015").model_copy(update={"bad_up_to": "0.5.11", "good_from": "0.5.13"})
    assert case.expected(release="0.5.12.post1", revert=None) == "unknown"


def test_the_examples_that_a_broken_scenario_file_is_answered_with_are_there():
    """They must be on a machine where nothing ran yet."""
    found = Path(catalogue.EXAMPLE.split(":  ")[1]).parent
    assert [catalogue.read_scenario(path) for path in found.glob("*.json")]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "CORPUS", tmp_path)
    entry = json.loads((catalogue.Path(catalogue.__file__).with_name("corpus") / "pr25015.json").read_text())

    def write(name, **changes):
        (tmp_path / f"{name}.json").write_text(json.dumps(entry | changes))

    return write


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"case_schema": 2}, "case_schema"),
        ({"revet": 1}, "unknown key 'revet'; did you mean 'revert'?"),
        ({"source": "x", "bad_up_to": "1"}, "finding F-066 says it already: leave out bad_up_to, source"),
        ({"finding": "F-0888"}, "unknown finding 'F-0888'"),
        ({"id": "pr1"}, "is called 'pr25015' but holds id 'pr1'"),
        ({"scenario": {"name": "x"}}, "scenario.requests: it is missing"),
    ],
)
def test_an_entry_that_is_not_one_is_refused(corpus, changes, words):
    corpus("pr25015", **changes)
    with pytest.raises(CaseError) as caught:
        catalogue.load("pr25015")
    assert words in str(caught.value)
    assert "pr25015.json" in str(caught.value)


def test_a_scenario_of_a_run_folder_is_read_back_as_it_was(tmp_path):
    scenario = catalogue.load("pr25015").scenario
    (tmp_path / "scenario.json").write_text(scenario.model_dump_json())
    read = catalogue.read_scenario(tmp_path / "scenario.json")
    assert isinstance(read, Scenario)
    assert (read, read.id) == (scenario, scenario.id)


@pytest.mark.parametrize(
    ("expected", "verdict", "kinds", "said"),
    [
        ("FAIL", "FAIL", ("POSITION", "NUMERIC"), "PASS"),  # a known bug that shows
        ("FAIL", "FAIL", ("NUMERIC",), "FAIL"),  # another one in its place
        ("FAIL", "PASS", (), "FAIL"),  # an unexpected pass
        ("PASS", "FAIL", ("POSITION",), "FAIL"),
        ("PASS", "PASS", (), "PASS"),
        ("FAIL", "UNKNOWN", (), "UNKNOWN"),
        ("unknown", "FAIL", ("POSITION",), "FAIL"),
        ("unknown", "PASS", (), "PASS"),
    ],
)
def test_a_matrix_passes_where_every_cell_is_as_expected(expected, verdict, kinds, said):
    met = catalogue.load("pr25015").as_expected(expected, Outcome(verdict), kinds)
    cell = {"verdict": verdict, "as_expected": met}
    assert catalogue.outcome_of([cell]) == said
    assert catalogue.outcome_of([cell, {"verdict": "PASS", "as_expected": True}]) == said


@pytest.mark.parametrize(("unexplained", "met"), [((), True), (("POSITION",), True), (("POSITION", "LEAK"), False)])
def test_a_matrix_fails_where_something_beside_the_case_is_nobodys_finding(unexplained, met):
    kinds = ("POSITION", "LEAK")
    assert catalogue.load("pr25015").as_expected("FAIL", Outcome.FAIL, kinds, unexplained=unexplained) is met
