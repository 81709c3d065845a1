"""Searches with real engines: windows of the corpus come back, and a commit of a checkout is found.

Only releases that the test suite has anyway take part. What is expected comes from the corpus and from the history
that the test makes, never from our output.
"""

import json
import subprocess
import sys

import pytest
from packaging.version import Version

from cases import catalogue
from cases.meta import histories
from cases.meta.command_line import call
from harness.bisect.search import Releases, Tried, search
from harness.bisect.verdicts import Failure, Run
from harness.engines import envs, releases

RELEASES = ("0.5.11", "0.5.12.post1", "0.5.13", "0.5.23")
CASE = catalogue.load("pr25015")
#: Every window of released wheels that a CPU can show, and the releases asked; docs/bisect.md has the whole searches.
#: The first two are scenarios that the tests of the windows drive too; the others cost a boot a release.
WINDOWS = {"pr25015": RELEASES, "pr26329": RELEASES, "pr24881": RELEASES[:2], "pr25109": RELEASES[:2]}


def _tried(engines, case, release):
    engines.assumed = case.assumes
    seen = engines(case.scenario, engine=release)
    signatures = tuple(found.signature for found in seen.findings if found.is_root)
    run = Run(outcome=seen.verdict.outcome, kinds=seen.verdict.root_kinds, signatures=signatures)
    failure = Failure(kinds=case.kinds)
    return Tried(name=release, call=run.call(failure), why=run.reason(failure))


@pytest.mark.engine(last=True)
def test_the_windows_of_known_bugs_come_back_exactly(engines, monkeypatch):
    """All that may be asked is driven release by release, so that each is imported once."""
    monkeypatch.setattr(engines, "assumed", ())
    cases = {name: case for name in WINDOWS if engines.device in (case := catalogue.load(name)).devices}
    if not cases:
        pytest.skip(f"none of them was seen on {engines.device}")
    asked = [(name, release) for release in RELEASES for name in cases if release in WINDOWS[name]]
    tried = {(name, release): _tried(engines, cases[name], release) for name, release in asked}
    windows, found = {}, {}
    for name, case in cases.items():
        last_bad = max((one for one in WINDOWS[name] if Version(one) <= Version(case.bad_up_to)), key=Version)
        first_good = min((one for one in WINDOWS[name] if Version(one) >= Version(case.good_from)), key=Version)
        windows[name] = (True, last_bad, first_good)
        answer = search(
            Releases(names=WINDOWS[name]), lambda release, name=name: tried[name, release], direction="fixed"
        )
        found[name] = (answer.exact, answer.last_bad, answer.first_good)
    assert found == windows


@pytest.fixture
def three_releases(engines, tmp_path, monkeypatch):
    """Three installed releases are all there are; no verdict of an earlier search is used. Returns a folder."""
    for release in RELEASES[:3]:
        engines.environment(release)  # skips where it is not installed; the command would install it
    monkeypatch.setattr(releases, "published", lambda: releases.Published(versions=RELEASES[:3]))
    monkeypatch.setattr("harness.cli.bisect_versions.published", releases.published)
    monkeypatch.setattr("harness.bisect.verdicts.Cache.at_home", lambda: _cache(tmp_path))
    return tmp_path


def _cache(folder):
    from harness.bisect.verdicts import Cache

    return Cache(folder=folder / "verdicts")


def _bisect(folder, *arguments):
    report = folder / "found.json"
    done = call("bisect", *arguments, "--runs", folder / "runs", "--json", report, code=0)
    return done, json.loads(report.read_text()) if report.is_file() else None


@pytest.mark.engine(release="0.5.11", boot=CASE.scenario.boot_key(), ends_it=True)
@pytest.mark.timeout(1200)
def test_the_command_finds_the_release_that_fixed_a_bug_and_asks_no_engine_twice(
    three_releases, commands_on_live_engine
):
    """Two neighbours, hence two engines: a longer line is searched above, and with pretended engines in cases/meta."""
    arguments = ("--case", "pr25015", "--bad", "0.5.11", "--good", "0.5.12.post1")
    _, found = _bisect(three_releases, *arguments)
    assert (found["last_bad"], found["first_good"], found["exact"]) == ("0.5.11", "0.5.12.post1", True)
    assert "sglang/srt/speculative/eagle_worker_v2.py" in {one["path"] for one in found["changed"]}
    again, same = _bisect(three_releases, *arguments)
    assert [one["cached"] for one in same["tried"]] == [1, 1]
    assert "booted" not in again.output


@pytest.mark.engine(release="0.5.13", boot=CASE.scenario.boot_key(), ends_it=True)
@pytest.mark.timeout(1800)
def test_the_commit_that_broke_a_checkout_is_found_by_running_it(engines, three_releases, tmp_path):
    """31 commits over two releases, half of them beside the Python files; the very middle cannot be judged."""
    engines.close()  # the command boots its own, in processes of its own
    sites = [envs.state(release).pythonpath[0] for release in RELEASES[1:3]]
    history, defect, foreign = histories.two_releases(
        tmp_path / "repo", older=sites[0], newer=sites[1], before=6, after=5, beside=16
    )
    assert len(history.commits) >= 30
    before = history.commits[history.commits.index(defect) - 1]
    command = ["bisect", "--case", "pr25015", "--repo", str(history.folder), "--good", "0.5.12.post1", "--bad", "HEAD"]
    report = tmp_path / "found.json"
    options = ["--runs", str(tmp_path / "runs"), "--json", str(report), "--fresh"]
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *command, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert (found["last_good"], found["first_bad"], found["exact"]) == (before, defect, True)
    calls = {one["name"]: one for one in found["tried"]}
    assert calls[foreign]["call"] == "unknown"
    assert calls[foreign]["why"].startswith("its pins are not those of 0.5.12.post1: torch==2.12.0")
    assert calls[defect]["kinds"] == ["POSITION"]
    assert history.git("worktree", "list", "--porcelain").count("worktree ") == 1
    assert [one["path"] for one in found["changed"]] == [histories.WORKER.removeprefix("python/")]
    _ran_the_commits_own_files(calls.values())


def _ran_the_commits_own_files(tried):
    """The handshake of every run names a worktree of its own, none of them a release's folder."""
    trees = []
    for one in tried:
        if one["run"] is not None:
            with open(f"{one['run']}/engine.jsonl") as lines:
                trees += [hello["tree"] for hello in map(json.loads, lines) if hello["event"] == "handshake"]
    assert len(trees) == len(set(trees)) >= 5
    assert all(tree.startswith(str(envs.home() / "bisect")) and tree.endswith("/python") for tree in trees)
