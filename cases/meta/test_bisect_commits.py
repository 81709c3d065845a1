"""`bisect --repo` with real git; verdicts are put in the cache beforehand, so no engine runs.

A commit whose verdict is not there would need an engine, and the pretended one does what a test says it does.
"""

from __future__ import annotations

import signal

import psutil
import pytest

from cases.meta import pretended_engine
from cases.meta.bisections import FAILS, PASSES, PINS, SETTING, bisect, furnish, know, notes, project, start
from cases.meta.command_line import call
from cases.meta.processes import wait_until
from harness.bisect.fitting import Needs, misfit, of_commit, of_release, rebuilt
from harness.bisect.repository import Repository
from harness.bisect.verdicts import Cache
from harness.cli import bisect_runs
from harness.driving.own_source import source_digest
from harness.engines import envs


@pytest.fixture
def home(work):
    """A home with two releases whose engines end at once, and their pins beside them."""
    furnish(work / "home")
    return work / "home"


@pytest.fixture
def history(tmp_path):
    return start(tmp_path / "repo")


def test_a_verdict_is_kept_for_one_state_of_our_own_files(home, monkeypatch):
    env = envs.state("0.5.13")
    before = SETTING.identity(env)
    assert before["checks"] == source_digest()
    monkeypatch.setattr(bisect_runs, "source_digest", lambda: "of another table")
    Cache.at_home().add(before, PASSES)
    assert Cache.at_home().runs(before)
    assert not Cache.at_home().runs(SETTING.identity(env))


def changed_at(commits, at, *, old=PASSES, new=FAILS):
    """Verdicts of commits of which number `at` is the first with the change."""
    return {commit: (old if place < at else new) for place, commit in enumerate(commits)}


def nothing_left(home, made):
    """Whether a search left no working tree and no folder."""
    return made.git("worktree", "list", "--porcelain").count("worktree ") == 1 and not list((home / "bisect").iterdir())


def untouched(made):
    """Everything of a checkout that a search could disturb."""
    names = ("HEAD", "index", "BISECT_START", "BISECT_LOG", "BISECT_TERMS")
    found = [path for path in (made.folder / ".git" / name for name in names) if path.exists()]
    files = {path.name: path.read_bytes() for path in found}
    trees = made.git("worktree", "list", "--porcelain")
    return files, trees, made.git("for-each-ref"), made.git("status", "--porcelain")


@pytest.mark.parametrize(("direction", "at"), [("broken", 1), ("broken", 17), ("fixed", 17), ("fixed", 32)])
def test_the_commit_with_the_change_is_found_among_many(home, history, tmp_path, direction, at):
    notes(history, 32)
    old, new = (PASSES, FAILS) if direction == "broken" else (FAILS, PASSES)
    commits = history.commits
    know(history, verdicts=changed_at(commits, at, old=old, new=new))
    ends = {"bad": commits[-1], "good": commits[0]} if direction == "broken" else {"bad": commits[0], "good": "HEAD"}
    found, said = bisect(history, tmp_path, **ends)
    names = ("last_good", "first_bad") if direction == "broken" else ("last_bad", "first_good")
    others = {"last_good", "first_bad", "last_bad", "first_good"} - set(names)
    assert tuple(found[name] for name in names) == (commits[at - 1], commits[at])
    assert [found[name] for name in others] == [None, None]
    assert found["exact"] is True
    assert len(found["tried"]) <= 2 + 6
    assert f"note {at}" in said.splitlines()[-1]


def test_a_commit_that_cannot_be_judged_is_passed_over_and_left_open_beside_the_answer(home, history, tmp_path):
    notes(history, 8)
    project(history, ["torch==2.12.0", "numpy"])
    foreign = history.commit("another torch")
    project(history, PINS["0.5.12.post1"])
    notes(history, 8)
    at = history.commits.index(foreign) + 1
    verdicts = changed_at(history.commits, at)
    del verdicts[foreign]
    know(history, verdicts=verdicts)
    found, said = bisect(history, tmp_path, bad="HEAD", good="0.5.12.post1", code=3)
    assert (found["last_good"], found["first_bad"]) == (history.commits[at - 2], history.commits[at])
    assert [one["name"] for one in found["between"]] == [foreign]
    (skipped,) = [one for one in found["tried"] if one["call"] == "unknown"]
    assert (skipped["name"], "torch==2.12.0 (there torch==2.11.0)" in skipped["why"]) == (foreign, True)
    assert foreign[:12] in said


def test_each_commit_runs_in_the_environment_of_the_release_whose_needs_it_has(home, history, tmp_path):
    notes(history, 3)
    project(history, PINS["0.5.13"])
    history.commit("0.5.13", tag="v0.5.13")
    notes(history, 4)
    older, newer = history.commits[:4], history.commits[4:]
    know(history, verdicts=dict.fromkeys(older, PASSES))
    know(history, release="0.5.13", verdicts={c: (PASSES if at < 2 else FAILS) for at, c in enumerate(newer)})
    found, _ = bisect(history, tmp_path, bad="HEAD", good="v0.5.12.post1")
    assert found["first_bad"] == newer[2]


def test_commits_whose_compiled_parts_have_other_sources_are_passed_over(home, history, tmp_path):
    notes(history, 2)
    history.write("rust/grpc/lib.rs", "2")
    history.write("python/sglang/notes.py", "# other\n")
    changed = history.commit("rust")
    repository = Repository(folder=history.folder)
    needs = of_commit(repository, changed)
    assert rebuilt(repository, history.commits[1], needs, version="0.5.12.post1") == ""
    said = rebuilt(repository, changed, needs, version="0.5.12.post1")
    assert said == "the sources of its compiled parts (rust/) are not those of v0.5.12.post1"
    assert "there is no tag v0.5.13" in rebuilt(repository, changed, needs, version="0.5.13")
    know(history, verdicts={history.commits[0]: PASSES, changed: FAILS})
    _, output = bisect(history, tmp_path, bad="HEAD", good="v0.5.12.post1", code=3)
    assert "the bad end, cannot be judged: the sources of its compiled parts (rust/)" in output


def test_pins_are_compared_by_what_they_ask_for_and_not_by_how_they_are_written(home, history):
    commit, release = Repository(folder=history.folder), home / "engines" / "0.5.12.post1" / "site" / "sglang"
    project(history, ["NumPy", "torch == 2.11.0"])
    spelled = history.commit("spelling")
    assert misfit(of_commit(commit, spelled), of_release(release), version="x") == ""
    project(history, ["numpy", "torch==2.11.0", "triton"])
    more = history.commit("more")
    assert misfit(of_commit(commit, more), of_release(release), version="x").endswith("x: triton (there no triton)")
    bare = Needs(pins=of_release(release).pins, compiled={})
    assert "compiled parts are not those of x: sglang.srt.grpc._core" in misfit(bare, of_release(release), version="x")


def test_the_checkout_its_worktrees_and_its_own_bisect_are_left_as_they_are(home, history, tmp_path):
    notes(history, 12)
    know(history, verdicts=changed_at(history.commits, 5))
    history.git("bisect", "start", "HEAD", "HEAD~3")
    history.write("python/sglang/notes.py", "# being edited\n")
    before = untouched(history)
    found, said = bisect(history, tmp_path, bad="main", good=history.commits[0])
    assert found["first_bad"] == history.commits[5]
    assert untouched(history) == before
    assert nothing_left(home, history)
    assert "uncommitted changes in" in said


def test_an_engine_that_dies_is_no_verdict(home, history, tmp_path):
    notes(history, 3)
    know(history, verdicts={history.commits[0]: PASSES, history.commits[-1]: FAILS})
    found, _ = bisect(history, tmp_path, bad="HEAD", good=history.commits[0], code=3)
    unknown = [one for one in found["tried"] if one["call"] == "unknown"]
    assert {one["name"] for one in unknown} == set(history.commits[1:-1])
    assert all("engine ended" in one["why"] for one in unknown)
    assert [one["name"] for one in found["between"]] == history.commits[1:-1]


def test_an_internal_error_stops_the_search_and_is_no_verdict(home, history, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("harness.cli.bisect_versions.one_run", broken)
    notes(history, 3)
    know(history, verdicts={history.commits[0]: PASSES, history.commits[-1]: FAILS})
    _, output = bisect(history, tmp_path, bad="HEAD", good=history.commits[0], code=4)
    assert "broken on purpose" in output
    assert "first bad" not in output
    assert nothing_left(home, history)


def test_a_search_that_is_ended_leaves_no_worktree_no_process_and_no_answer(home, history, tmp_path):
    python = next(home.glob("closure-*/bin/python"))
    python.write_text(f"#!/bin/sh\n{pretended_engine.SLEEPS}\n")
    notes(history, 3)
    know(history, verdicts={history.commits[0]: PASSES, history.commits[-1]: FAILS})
    options = ["--case", "pr25015", "--repo", str(history.folder), "--bad", "HEAD", "--good", history.commits[0]]
    process = pretended_engine.start("bisect", *options, cwd=tmp_path, home=home)
    wait_until(lambda: list(tmp_path.glob("runs/*/*.log")), process=process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 3, out + err
    assert "ended by SIGTERM" in err
    assert "first bad" not in out
    assert nothing_left(home, history)
    wait_until(
        lambda: not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]
    )


def test_what_a_killed_search_left_behind_is_removed_by_the_next(home, history, tmp_path):
    notes(history, 1)
    know(history, verdicts={history.commits[0]: PASSES, history.commits[1]: FAILS})
    left = home / "bisect" / "eaglecheck-abcdef"
    left.mkdir(parents=True)
    (left / "owner.lock").touch()
    (left / "repository").write_text(str(history.folder))
    history.git("worktree", "add", "--detach", str(left / "tree"), "HEAD")
    bisect(history, tmp_path, bad="HEAD", good=history.commits[0])
    assert not left.exists()
    assert nothing_left(home, history)


REFUSED = {
    "no-folder": (["--repo", "nowhere"], "--repo nowhere: not a git checkout (there is no folder nowhere)"),
    "no-checkout": (["--repo", "bare"], "--repo bare: not a git checkout (fatal: not a git repository"),
    "no-commit": (["--good", "v9"], "--good v9: no such commit or tag"),
    "not-sglang": (["--good", "other"], "--good other: not a commit of SGLang, it has no python/sglang/__init__.py"),
    "same": (["--good", "HEAD"], "are the same commit"),
    "apart": (["--good", "aside"], "neither of --bad HEAD and --good aside contains the other"),
    "nothing-between": (["--good", "HEAD~1"], "touches python/, so both run the same"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_checkout_or_commit_that_cannot_be_searched_is_refused_before_anything_slow(home, history, tmp_path, name):
    options, said = REFUSED[name]
    (tmp_path / "bare").mkdir()
    history.git("checkout", "--quiet", "--orphan", "other")
    history.git("rm", "-rq", "--cached", ".")
    history.write("README", "another project")
    history.git("add", "README")
    history.git("commit", "--quiet", "-m", "another project")
    history.git("checkout", "--quiet", "-f", "main")
    history.git("checkout", "--quiet", "-b", "aside")
    notes(history, 1)
    history.git("checkout", "--quiet", "main")
    notes(history, 1)
    history.write("README", "words")
    history.commit("words only")
    arguments = {"--repo": str(history.folder), "--bad": "HEAD", "--good": "v0.5.12.post1", **dict([options])}
    typed = [word for option in arguments.items() for word in option]
    done = call("bisect", "--case", "pr25015", *typed, code=2)
    assert said in done.output.replace("\n", " ").replace("  ", " ")
