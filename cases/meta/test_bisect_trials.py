"""What a search remembers, what one version's runs add up to, which releases there are, which files changed."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from cases.meta import pretended_engine
from harness.archive.faults import WriteError
from harness.bisect import changes
from harness.bisect.trials import RISK, Rate, Trials
from harness.bisect.verdicts import Cache, Failure, Run
from harness.contract.types import Outcome
from harness.engines import releases

SIGNATURE = "POSITION:positions:DRAFT:one-ahead"
PASSES = Run(outcome=Outcome.PASS, run="runs/pass", seconds=3.0)
FAILS = Run(outcome=Outcome.FAIL, kinds=("POSITION",), signatures=(SIGNATURE,), run="runs/fail", seconds=4.0)
OTHERWISE = Run(outcome=Outcome.FAIL, kinds=("CRASH",), signatures=("CRASH:ledger:VERIFY:any",))
SILENT = Run(outcome=Outcome.UNKNOWN, why="the engine would not start: KeyError: 'x'; full log: /tmp/x\n  line")
FAILURE = Failure(signature=SIGNATURE)
WHO = {"scenario": "0123456789ab", "engine": {"release": "0.5.13"}, "lock": {}}


@pytest.fixture
def cache(tmp_path):
    return Cache(folder=tmp_path / "verdicts")


def runs_of(*outcomes):
    """A function that gives these runs, one a call, and fails the test when it is asked for more."""
    left = list(outcomes)

    def one_run():
        assert left, "one run too many"
        return left.pop(0)

    return one_run


def trials(cache, **options):
    return Trials(failure=options.pop("failure", FAILURE), cache=cache, **options)


@pytest.mark.parametrize(
    ("run", "failure", "expected"),
    [
        (PASSES, FAILURE, "good"),
        (FAILS, FAILURE, "bad"),
        (OTHERWISE, FAILURE, "unknown"),
        (SILENT, FAILURE, "unknown"),
        (FAILS, Failure(kinds=("POSITION", "TOKEN")), "bad"),
        (OTHERWISE, Failure(kinds=("POSITION",)), "unknown"),
        (OTHERWISE, Failure(), "bad"),
    ],
)
def test_only_the_failure_itself_is_bad_and_another_one_says_nothing(run, failure, expected):
    assert run.call(failure) == expected


def test_why_names_what_was_seen_without_the_log_behind_it():
    assert SILENT.reason(FAILURE) == "the engine would not start: KeyError: 'x'"
    assert OTHERWISE.reason(FAILURE) == f"diverges otherwise: CRASH; not signature {SIGNATURE}"
    assert FAILS.reason(FAILURE) == "diverges: POSITION"


def test_a_verdict_is_run_once_and_remembered(cache):
    first = trials(cache).judge("0.5.13", identity=WHO, one_run=runs_of(FAILS))
    again = trials(cache).judge("0.5.13", identity=WHO, one_run=runs_of())
    assert (first.call, first.cached, first.seconds) == ("bad", 0, 4.0)
    assert (again.call, again.cached, again.seconds, again.run) == ("bad", 1, 0.0, "runs/fail")


def test_a_disk_without_room_for_a_verdict_is_named(full_disk):
    cache = Cache(folder=full_disk / "verdicts")
    with pytest.raises(WriteError, match=f"the disk is full: cannot write to {cache.folder}"):
        cache.add(WHO, PASSES)


def test_fresh_runs_again_and_its_verdict_counts_too(cache):
    trials(cache).judge("0.5.13", identity=WHO, one_run=runs_of(PASSES))
    found = trials(cache, fresh=True).judge("0.5.13", identity=WHO, one_run=runs_of(FAILS))
    assert (found.call, found.cached) == ("bad", 0)
    assert [run.outcome for run in cache.runs(WHO)] == [Outcome.PASS, Outcome.FAIL]


@pytest.mark.parametrize(
    "change",
    [{"scenario": "ba9876543210"}, {"engine": {"release": "0.5.14"}}, {"lock": {"torch": "2"}}, {"checks": "x"}],
)
def test_another_scenario_engine_lock_or_version_of_our_checks_is_another_verdict(cache, change):
    cache.add(WHO, FAILS)
    assert cache.runs({**WHO, **change}) == []
    assert cache.runs(dict(reversed(WHO.items()))) == [FAILS]


def test_a_run_without_a_verdict_is_not_remembered(cache):
    found = trials(cache).judge("0.5.13", identity=WHO, one_run=runs_of(SILENT))
    assert (found.call, found.tries) == ("unknown", 1)
    assert cache.runs(WHO) == []


def test_a_line_that_was_cut_off_is_not_there(cache):
    cache.add(WHO, PASSES)
    cache.add(WHO, FAILS)
    (path,) = cache.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert cache.runs(WHO) == [PASSES]


def test_the_failure_of_a_scenario_without_one_is_what_the_bad_end_shows_first(cache):
    found = trials(cache, failure=Failure())
    found.judge("0.5.11", identity=None, one_run=runs_of(FAILS))
    assert found.failure == FAILURE
    assert found.judge("0.5.12", identity=None, one_run=runs_of(OTHERWISE)).call == "unknown"


def test_a_scenario_whose_kept_verdicts_disagree_is_known_to_be_flaky_and_repeated(cache):
    for run in (FAILS, PASSES, FAILS, PASSES, FAILS, FAILS):
        cache.add(WHO, run)
    found = trials(cache)
    assert found.judge("0.5.11", identity=WHO, one_run=runs_of()).call == "bad"
    assert found.rate == Rate(failures=4, tries=6)
    assert found.repeated
    wanted = Rate(failures=4, tries=6).tries_for()
    good = found.judge("0.5.13", identity=None, one_run=runs_of(*[PASSES] * wanted))
    assert (good.call, good.tries) == ("good", wanted)
    assert 0 < good.risk <= RISK


def test_a_release_is_bad_as_soon_as_the_failure_was_seen(cache):
    found = trials(cache, repeat=5)
    found.judge("0.5.11", identity=None, one_run=runs_of(*[FAILS] * 5))
    bad = found.judge("0.5.12", identity=None, one_run=runs_of(PASSES, PASSES, FAILS))
    assert (bad.call, bad.tries, bad.failures, bad.risk) == ("bad", 3, 1, 0.0)


def test_repeats_that_cannot_all_be_judged_are_no_pass(cache):
    found = trials(cache, repeat=3)
    found.judge("0.5.11", identity=None, one_run=runs_of(*[FAILS] * 3))
    assert found.judge("0.5.12", identity=None, one_run=runs_of(PASSES, SILENT)).call == "unknown"


# --- which releases there are


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path))
    return tmp_path


def pip_says(monkeypatch, stdout="", stderr="", code=0):
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    monkeypatch.setattr(releases.subprocess, "run", run)
    return asked


def test_releases_come_from_pip_in_version_order_and_are_asked_for_once(home, monkeypatch):
    asked = pip_says(monkeypatch, "sglang (0.5.13)\nAvailable versions: 0.5.9, 0.5.13, 0.5.12.post1, 0.5.12\n")
    for _ in range(2):
        found = releases.published()
        assert found.versions == ("0.5.9", "0.5.12", "0.5.12.post1", "0.5.13")
        assert (found.note, found.complete) == ("", True)
    assert len(asked) == 1
    assert asked[0][-4:-1] == ["index", "versions", "sglang"]


def test_an_old_list_is_used_without_an_index_and_says_its_age(home, monkeypatch):
    (home / "published.json").write_text(json.dumps({"versions": ["0.5.11"], "when": 0.0}))
    pip_says(monkeypatch, stderr="ERROR: no route to host", code=1)
    found = releases.published()
    assert found.versions == ("0.5.11",)
    assert found.note == "pip could not list the releases (ERROR: no route to host); using the list of 1970-01-01"


def test_without_index_and_list_the_installed_releases_are_used_and_that_is_said(home, monkeypatch):
    pretended_engine.furnish(home, versions=("0.5.13", "0.5.9"))
    pip_says(monkeypatch, stderr="ERROR: no route to host", code=1)
    found = releases.published()
    assert found.versions == ("0.5.9", "0.5.13")
    assert not found.complete
    assert "using those installed here only" in found.note


def test_a_fresh_list_is_not_asked_for_again_and_a_damaged_one_is(home, monkeypatch):
    asked = pip_says(monkeypatch, "Available versions: 0.5.13\n")
    (home / "published.json").write_text(json.dumps({"versions": ["0.5.11"], "when": time.time()}))
    assert releases.published().versions == ("0.5.11",)
    (home / "published.json").write_text("{")
    assert releases.published().versions == ("0.5.13",)
    assert len(asked) == 1


def test_the_span_holds_its_ends_and_what_lies_between_without_pre_releases():
    versions = ("0.5.10", "0.5.11", "0.5.12rc0", "0.5.12", "0.5.12.post1", "0.5.13")
    assert releases.span(versions, ("0.5.12.post1", "0.5.10")) == ("0.5.10", "0.5.11", "0.5.12", "0.5.12.post1")
    assert releases.span(versions, ("0.5.12rc0", "0.5.13"))[0] == "0.5.12rc0"


# --- which files changed


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_changed_files_are_the_speculative_ones_with_lines_that_came_and_went(tmp_path):
    old = tree(
        tmp_path / "old",
        {"srt/speculative/a.py": "1\n2\n3\n", "srt/speculative/gone.py": "1\n", "srt/managers/x.py": "1\n"},
    )
    new = tree(
        tmp_path / "new",
        {"srt/speculative/a.py": "1\n3\n4\n5\n", "srt/models/llama_eagle3.py": "1\n2\n", "srt/managers/x.py": "2\n"},
    )
    found = [(one.path, one.added, one.removed, one.state) for one in changes.changed_files(old, new)]
    assert found == [
        ("sglang/srt/speculative/a.py", 2, 1, "changed"),
        ("sglang/srt/models/llama_eagle3.py", 2, 0, "added"),
        ("sglang/srt/speculative/gone.py", 0, 1, "removed"),
    ]
    assert changes.changed_files(old, old) == ()
