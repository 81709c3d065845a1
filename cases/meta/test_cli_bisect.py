"""`eaglecheck bisect` over releases as it is typed: what it refuses, what it prints, what it writes. No engine.

Verdicts are put in the cache beforehand. A release whose verdict is not there would need an engine, which ends at once.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from cases import catalogue
from cases.meta import pretended_engine, results
from cases.meta.command_line import call
from harness.bisect.trials import Subject
from harness.bisect.verdicts import Cache, Failure, Run
from harness.cli.bisect_runs import Setting
from harness.contract.types import Outcome
from harness.engines import envs

CASE = catalogue.load("pr25015")
DOCS = Path(__file__).parents[2] / "docs" / "bisect.md"
RELEASES = ("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.14", "0.5.15", "0.5.16")
PASSES = Run(outcome=Outcome.PASS, run="runs/pass", seconds=20.0)
FAILS = Run(
    outcome=Outcome.FAIL,
    kinds=("POSITION",),
    signatures=("POSITION:positions:DRAFT:one-ahead",),
    run="runs/fail",
    seconds=21.0,
)
PLAIN = ["bisect", "--case", "pr25015", "--bad", "0.5.11", "--good", "0.5.16"]


@pytest.fixture
def place(work, monkeypatch):
    """A home in which every release is installed and published, and a working folder with unfit files."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(catalogue, "names", lambda: ["pr25015", "pr26329"])  # the corpus grows, these texts need not
    monkeypatch.setattr(catalogue, "EXAMPLE", "working examples:  SCENARIOS/*.json")
    pretended_engine.furnish(work / "home", versions=RELEASES, published=("0.5.9", *RELEASES))
    work = work / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "empty").mkdir()
    (work / "list.json").write_text("[]")
    return work


def know(scenario, failing, *, known=RELEASES):
    """Verdicts for these releases: failing where it says so."""
    setting = Setting(subject=Subject(name=scenario.name, scenario=scenario, failure=Failure()), device="cpu")
    for release in known:
        Cache.at_home().add(setting.identity(envs.state(release)), FAILS if release in failing else PASSES)


def lines_of(package, release, files):
    for name, text in files.items():
        path = envs.state(release).pythonpath[0] / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def stable(text):
    """Without the ids, times and places that differ from run to run."""
    text = re.sub(r"\d{8}-\d{4}-[0-9a-f]{4}", results.RUN.name, text)
    text = re.sub(r"\S+/work/", "", text)
    return re.sub(r"unknown +\d+ ", "unknown N ", text)


ENDS = ("--bad", "0.5.11", "--good", "0.5.13")
#: What is typed behind `bisect`, and what the refusal must name: the option and its value, or what is allowed.
REFUSED = {
    "nothing-named": (ENDS, ("--case", "--scenario-file")),
    "two-things-named": ((*PLAIN[1:], "--scenario-file", "list.json"), ("--case", "--scenario-file")),
    "case-unknown": (("--case", "pr2501", *ENDS), ("--case", "'pr2501'", "'pr25015'")),
    "case-no-reproducer": (("--case", "empty", *ENDS), ("--case empty", "manifest.json")),
    "file-no-scenario": (("--scenario-file", "list.json", *ENDS), ("list.json", "SCENARIOS/")),
    "same-end": (("--case", "pr25015", "--bad", "0.5.11", "--good", "0.5.11"), ("--bad", "--good", "0.5.11")),
    "no-version": (("--case", "pr25015", "--bad", "main", "--good", "0.5.13"), ("--bad 'main'", "--repo")),
    "too-old": (("--case", "pr25015", "--bad", "0.5.9", "--good", "0.5.13"), ("--bad", "0.5.9", "0.5.11")),
    "not-published": (("--case", "pr25015", "--bad", "0.5.11", "--good", "0.5.99"), ("--good", "0.5.99", "0.5.16")),
    "repeat-none": ((*PLAIN[1:], "--repeat", "0"), ("--repeat 0", "1 to 60")),
    "repeat-many": ((*PLAIN[1:], "--repeat", "1000"), ("--repeat 1000", "1 to 60")),
    "backend": ((*PLAIN[1:], "--backend", "fa3"), ("--attention-backend", "'fa3'", "triton")),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_searched_is_refused_with_what_to_type(name, place):
    typed, named = REFUSED[name]
    done = call("bisect", *typed)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert not [word for word in named if word not in done.stderr], done.stderr
    assert len(done.stderr.splitlines()) > 1, "and below it what is allowed, or what to type"
    assert not list(place.glob("runs/*"))


def test_a_fix_is_found_and_shown(place, snapshot):
    know(CASE.scenario, {"0.5.11", "0.5.12", "0.5.12.post1"})
    lines_of("sglang/srt/speculative", "0.5.12.post1", {"eagle_worker_v2.py": "a\nb\n", "old.py": "a\n"})
    lines_of("sglang/srt/speculative", "0.5.13", {"eagle_worker_v2.py": "a\nc\nd\n", "new.py": "a\n" * 12})
    done = call(*PLAIN, "--json", "found.json", code=0)
    assert done.stdout == snapshot
    assert max(map(len, done.stdout.splitlines())) <= 120
    found = json.loads((place / "found.json").read_text())
    assert (found["last_bad"], found["first_good"], found["exact"]) == ("0.5.12.post1", "0.5.13", True)
    assert (found["first_bad"], found["last_good"]) == (None, None)
    assert {one["path"] for one in found["changed"]} == {
        f"sglang/srt/speculative/{name}.py" for name in ("eagle_worker_v2", "new", "old")
    }


def test_a_regression_is_found_when_the_good_end_is_the_older(place):
    know(CASE.scenario, {"0.5.14", "0.5.15", "0.5.16"})
    done = call("bisect", "--case", "pr25015", "--good", "0.5.11", "--bad", "0.5.16", "--json", "-", code=0)
    found = json.loads(done.stdout)
    assert (found["direction"], found["last_good"], found["first_bad"]) == ("broken", "0.5.13", "0.5.14")
    assert "first bad release: 0.5.14; last good: 0.5.13" in done.stderr


def test_a_release_that_cannot_be_judged_leaves_a_range_that_is_said_and_exit_3(place, snapshot):
    know(CASE.scenario, {"0.5.11", "0.5.12"}, known=[name for name in RELEASES if name != "0.5.12.post1"])
    done = call(*PLAIN, "--json", "found.json", code=3)
    found = json.loads((place / "found.json").read_text())
    assert [one["name"] for one in found["between"]] == ["0.5.12.post1"]
    assert (found["last_bad"], found["first_good"], found["exact"]) == ("0.5.12", "0.5.13", False)
    (unknown,) = [one for one in found["tried"] if one["call"] == "unknown"]
    assert (unknown["name"], unknown["run"] is not None) == ("0.5.12.post1", True)
    assert stable(done.stdout[done.stdout.index("tried\n") :]) == snapshot


def test_a_failure_that_comes_and_goes_is_repeated_and_its_risk_stated(place, snapshot):
    for _ in range(6):
        know(CASE.scenario, {"0.5.11", "0.5.12"})
    know(CASE.scenario, set())
    done = call(*PLAIN, "--repeat", "7", code=0)
    assert done.stdout[done.stdout.index("tried\n") :] == snapshot


def test_ends_without_a_change_between_them_are_a_usage_error_with_what_was_seen(place):
    know(CASE.scenario, set(RELEASES))
    done = call(*PLAIN, code=2)
    assert "no change between 0.5.11 and 0.5.16" in done.stderr
    assert "--repeat 5" in done.stderr
    assert "0.5.16 is" in done.stdout


def test_an_end_without_a_verdict_is_unknown(place):
    know(CASE.scenario, {"0.5.11"}, known=RELEASES[:-1])
    done = call(*PLAIN, code=3)
    assert "0.5.16, the good end, cannot be judged: the engine ended" in done.stderr


def searched(place, *typed, code=0):
    """What `bisect` with these options writes."""
    call("bisect", *typed, "--json", "found.json", code=code)
    return json.loads((place / "found.json").read_text())


def test_a_reproducer_is_searched_for_its_own_signature_on_releases_as_published(place):
    run = results.store(place / "runs", ("pr25015", results.one_ahead))
    (reproducer,) = run.glob("reproducers/*")
    scenario = results.named("pr25015")
    know(scenario, {"0.5.11", "0.5.12", "0.5.12.post1"})
    found = searched(place, "--case", str(reproducer), "--bad", "0.5.11", "--good", "0.5.16")
    assert found["failure"] == {"signature": "POSITION:positions:DRAFT:one-ahead", "kinds": []}
    assert (found["scenario"], found["first_good"]) == (scenario.id, "0.5.13")


def test_a_scenario_file_is_searched_for_what_the_bad_end_shows_first(place):
    (place / "own.json").write_text(CASE.scenario.model_dump_json())
    know(CASE.scenario, {"0.5.11"})
    found = searched(place, "--scenario-file", "own.json", *ENDS)
    assert found["failure"]["signature"] == "POSITION:positions:DRAFT:one-ahead"
    assert (found["last_bad"], found["first_good"]) == ("0.5.11", "0.5.12")


def test_without_an_index_the_installed_releases_are_searched_and_that_is_said(place, monkeypatch):
    (place.parent / "home" / "published.json").unlink()
    monkeypatch.setattr("harness.engines.releases._ask_pip", lambda: ((), "no route to host"))
    shutil.rmtree(place.parent / "home" / "engines" / "0.5.14")
    know(CASE.scenario, {"0.5.11"}, known=[name for name in RELEASES if name != "0.5.14"])
    done = call(*PLAIN, code=0)
    assert "pip could not list the releases (no route to host); using those installed here only" in done.stdout
    assert "6 releases from 0.5.11 to 0.5.16" in done.stdout


def test_every_key_that_is_written_is_described(place):
    know(CASE.scenario, {"0.5.11"})
    found = searched(place, *PLAIN[1:])
    keys = {*found, *found["failure"], *found["tried"][0], *found["rate"]}
    assert keys <= set(re.findall(r"`(\w+)`", DOCS.read_text()))
