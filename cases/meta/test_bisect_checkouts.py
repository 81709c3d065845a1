"""`bisect --repo` over clones as people have them: bare, shallow, with merges, renames and files that went away.

Real git; verdicts are in the cache beforehand, as in test_bisect_commits.
"""

from __future__ import annotations

import subprocess

import pytest

from cases.meta.bisections import FAILS, PASSES, bisect, furnish, know, notes, start
from cases.meta.histories import History
from harness.archive.faults import WriteError
from harness.bisect.repository import Repository, worktrees


@pytest.fixture
def home(work):
    """A home with two releases whose engines end at once, and their pins beside them."""
    furnish(work / "home")
    return work / "home"


@pytest.fixture
def history(tmp_path):
    """The layout of SGLang's repository: kernels, docs, tests and Rust beside python/, a release tag, a side branch."""
    made = start(tmp_path / "repo")
    for path in ("sgl-kernel/csrc/a.cu", "docs/index.md", "test/srt/test_a.py", "python/sglang/srt/old.py"):
        made.write(path, "1")
    made.commit("layout")
    return made


def beside(made, count):
    """Commits that touch nothing under python/."""
    for number in range(count):
        made.write(("docs/index.md", "sgl-kernel/csrc/a.cu", "test/srt/test_a.py")[number % 3], str(len(made.commits)))
        made.commit(f"beside {len(made.commits)}")


def clone(made, folder, *options):
    subprocess.run(
        ["git", "clone", "--quiet", *options, f"file://{made.folder}", str(folder)], check=True, capture_output=True
    )
    return History(folder=folder, commits=list(made.commits))


def known(made, *, defect):
    """Verdicts of every commit, by whether it contains the one with the defect."""
    contains = Repository(folder=made.folder).contains
    commits = made.git("rev-list", "--all").splitlines()
    know(made, release="0.5.12.post1", verdicts={one: FAILS if contains(defect, one) else PASSES for one in commits})


def test_commits_beside_the_python_files_are_not_tried(home, history, tmp_path):
    notes(history, 3)
    beside(history, 6)
    notes(history, 1)
    defect = history.commits[-1]
    beside(history, 9)
    notes(history, 2)
    beside(history, 4)
    known(history, defect=defect)
    found, _ = bisect(history, tmp_path, bad="HEAD", good="v0.5.12.post1")
    assert found["first_bad"] == defect
    assert found["versions"] == 1 + 1 + 3 + 1 + 2, "the release, and commits that touch python/"
    assert not [one["title"] for one in found["tried"] if one["title"].startswith("beside")]


@pytest.mark.parametrize("where", ["side", "main", "merge"])
def test_a_defect_is_found_on_either_side_of_a_merge_and_in_it(home, history, tmp_path, where):
    """Two branches with six commits each, which meet and go on."""
    notes(history, 2)
    history.git("checkout", "--quiet", "-b", "side")
    for number in range(6):
        history.write("python/sglang/side.py", f"# {number}\n")
        history.commit(f"side {number}")
    history.git("checkout", "--quiet", "main")
    notes(history, 6)
    history.git("merge", "--quiet", "--no-ff", "--no-edit", "--no-commit", "side")
    history.write("python/sglang/both.py", "made by the merge")
    history.commit("merge side")
    notes(history, 4)
    at = {"side": "side 3", "main": "note 12", "merge": "merge side"}[where]
    (defect,) = [one for one in history.commits if history.git("show", "-s", "--format=%s", one) == at]
    known(history, defect=defect)
    found, said = bisect(history, tmp_path, bad="HEAD", good="v0.5.12.post1")
    assert (found["first_bad"], found["exact"]) == (defect, True)
    assert at in said.splitlines()[-1]
    assert f"look at the commit: git -C {history.folder} show {defect[:12]}" in " ".join(said.split())
    assert history.git("worktree", "list", "--porcelain").count("worktree ") == 1


def test_a_tree_is_exactly_its_commits_python_files(home, history):
    """Deleted, renamed and merged ones too, and whatever lies about in the checkout."""
    notes(history, 1)
    history.git("rm", "--quiet", "python/sglang/srt/old.py")
    history.commit("delete a module")
    history.git("mv", "python/sglang/notes.py", "python/sglang/moved.py")
    history.commit("rename one")
    history.write("python/sglang/srt/old.py", "back again, and not committed")
    history.write("python/sglang/moved.py", "being edited")
    repository = Repository(folder=history.folder)
    assert repository.dirty()
    with worktrees(repository) as trees:
        for commit in history.commits:
            with trees.tree(commit) as python:
                tree = python.parent
                files = {path.relative_to(tree).as_posix() for path in (tree / "python").rglob("*") if path.is_file()}
                assert files == set(history.git("ls-tree", "-r", "--name-only", commit, "python").splitlines())
                shown = {name: history.git("show", f"{commit}:{name}") for name in files}
                assert {name: (tree / name).read_text().strip() for name in files} == shown


def test_a_disk_without_room_for_worktrees_is_named_and_nothing_stays(full_disk, history, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_HOME", str(full_disk))
    with (
        pytest.raises(WriteError, match=f"the disk is full: cannot write to {full_disk / 'bisect'}"),
        worktrees(Repository(folder=history.folder)),
    ):
        pass
    assert not [*(full_disk / "bisect").iterdir()]


def test_a_bare_clone_is_searched_as_a_checkout_is(home, history, tmp_path):
    notes(history, 9)
    defect = history.commits[6]
    known(history, defect=defect)
    bare = clone(history, tmp_path / "bare.git", "--bare")
    found, said = bisect(bare, tmp_path, bad="main", good="v0.5.12.post1")
    assert (found["first_bad"], found["exact"]) == (defect, True)
    assert "uncommitted" not in said
    assert bare.git("worktree", "list", "--porcelain").count("worktree ") == 1, "itself"
    assert bare.git("for-each-ref", "refs/bisect") == ""


def test_a_shallow_clone_is_searched_where_it_reaches_and_says_so_where_it_does_not(home, history, tmp_path):
    notes(history, 12)
    defect = history.commits[-3]
    known(history, defect=defect)
    shallow = clone(history, tmp_path / "shallow", "--depth=6")
    _, said = bisect(shallow, tmp_path, bad="HEAD", good="v0.5.12.post1", code=2)
    assert "fetch --tags --unshallow" in " ".join(said.split())
    _, said = bisect(history, tmp_path, bad="HEAD", good="v0.4.9", code=2)
    assert said.endswith("fetch --tags\n")  # git refuses to complete a whole clone
    _, said = bisect(shallow, tmp_path, bad="HEAD", good="HEAD~4", code=3)
    assert "there is no tag v0.5.12.post1 to compare the sources of compiled parts with" in " ".join(said.split())
    shallow.git("fetch", "--quiet", "--depth=1", "origin", "tag", "v0.5.12.post1")
    found, _ = bisect(shallow, tmp_path, bad="HEAD", good="HEAD~4")
    assert (found["first_bad"], found["exact"]) == (defect, True)
    _, said = bisect(shallow, tmp_path, bad="HEAD", good="v0.5.12.post1", code=2)
    assert "this clone is shallow, so the line may only be cut off" in " ".join(said.split())
