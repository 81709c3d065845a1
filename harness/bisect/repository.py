"""Git, asked about a checkout that is not ours: the line of its commits to search along, and worktrees of them.

Nothing here changes its files, its branches or its bisect. Worktrees are in a folder of our own and go again; what a
killed search left is removed by the next. It must not know about releases or verdicts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness.archive.faults import home_room
from harness.bisect.search import Direction
from harness.contract.usage import UsageError
from harness.engines.dependencies import home
from harness.engines.temporary_folders import TemporaryFolder, abandoned

#: The user's hooks, garbage collection and advice are not for our worktrees.
QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "advice.detachedHead=false")
#: Only commits that touch this can change what the engine runs.
PYTHON = "python"
PROJECT = f"{PYTHON}/pyproject.toml"
PACKAGE = f"{PYTHON}/sglang/__init__.py"
#: Beside worktrees: a file with the folder of their repository.
REPOSITORY = "repository"


class GitError(Exception):
    """Git would not; the text is what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A checkout by its top folder, or a bare clone by its own."""

    folder: Path

    def git(self, *arguments: str, at: Path | None = None) -> str:
        """What git prints, stripped; GitError if it fails. at: another worktree of the repository."""
        return run_git(at or self.folder, *arguments)

    def asks(self, *arguments: str) -> str | None:
        """What git prints, None where it says no."""
        try:
            return self.git(*arguments)
        except GitError:
            return None

    def commit(self, name: str) -> str | None:
        """The full id of what `name` (or the release tag v<name>) names; None if nothing does."""
        for one in (name, f"v{name}"):
            found = self.asks("rev-parse", "--verify", "--quiet", f"{one}^{{commit}}")
            if found:
                return found
        return None

    def content(self, commit: str, path: str) -> str | None:
        """A file of a commit as text, None if it has none."""
        return self.asks("show", f"{commit}:{path}")

    def object_id(self, commit: str, path: str) -> str | None:
        """Content id of a file or folder of a commit, None if it has none."""
        return self.asks("rev-parse", "--verify", "--quiet", f"{commit}:{path}")

    def title(self, commit: str) -> str:
        return self.git("show", "--no-patch", "--format=%s", commit)

    def contains(self, old: str, new: str) -> bool:
        """Whether `old` is an ancestor of `new`."""
        return self.asks("merge-base", "--is-ancestor", old, new) is not None

    def line(self, olds: Sequence[str], new: str) -> list[str]:
        """Commits up to `new` that touch the Python files and that none of `olds` contains, oldest first."""
        others = [f"^{one}" for one in olds]
        return self.git("rev-list", "--reverse", "--topo-order", new, *others, "--", PYTHON).splitlines()

    def numstat(self, old: str, new: str) -> list[tuple[str, str, str]]:
        """(added, removed, path) of every Python file that differs; git's '-' for a binary one."""
        text = self.git("diff", "--numstat", "--no-renames", old, new, "--", PYTHON)
        return [(one[0], one[1], one[2]) for one in (line.split("\t", 2) for line in text.splitlines())]

    def tag_before(self, commit: str) -> str | None:
        """The nearest release tag that `commit` contains."""
        return self.asks("describe", "--tags", "--abbrev=0", "--match=v[0-9]*", "--exclude=*rc*", commit)

    def shallow(self) -> bool:
        """Whether its history was cut off when it was cloned."""
        return self.asks("rev-parse", "--is-shallow-repository") == "true"

    def dirty(self) -> bool:
        if self.asks("rev-parse", "--is-bare-repository") == "true":
            return False
        return bool(self.git("status", "--porcelain", "--untracked-files=no"))


def run_git(folder: Path, *arguments: str) -> str:
    command = ["git", *QUIET, "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=_clean())
    except OSError as error:
        raise GitError(f"git cannot be run: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise GitError(said or f"git {arguments[0]} ended with {done.returncode}")
    return done.stdout.strip()


def _clean() -> dict[str, str]:
    """The environment without git's own variables, which would name another repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def open_repository(path: Path) -> Repository:
    """The repository that `path` lies in; GitError if there is none."""
    if not path.is_dir():
        raise GitError(f"there is no folder {path}")
    bare = run_git(path, "rev-parse", "--is-bare-repository") == "true"
    return Repository(folder=Path(run_git(path, "rev-parse", "--absolute-git-dir" if bare else "--show-toplevel")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Worktrees:
    """A folder for the worktrees of one search."""

    folder: Path
    repository: Repository

    @contextlib.contextmanager
    def tree(self, commit: str, *, compiled: Path | None = None) -> Iterator[Path]:
        """The commit's Python files in a worktree that no other commit ever had: compiled files cannot be stale.

        compiled: a release's package, whose compiled modules are put where the Python files look for them, as links.
        """
        path = self.folder / f"{commit[:12]}-{secrets.token_hex(2)}"
        self.repository.git("worktree", "add", "--detach", "--no-checkout", str(path), commit)
        try:
            self.repository.git("checkout", "--quiet", commit, "--", PYTHON, at=path)
            if compiled is not None:
                _link(compiled, path / PYTHON / "sglang")
            yield path / PYTHON
        finally:
            _remove(self.repository, path)


@contextlib.contextmanager
def worktrees(repository: Repository) -> Iterator[Worktrees]:
    """A folder under EAGLECHECK_HOME, removed with every worktree in it."""
    root = home() / "bisect"
    with contextlib.ExitStack() as held:
        with home_room(root):
            root.mkdir(parents=True, exist_ok=True)
            with abandoned(root) as found:
                for folder in found:
                    _clear(folder)
            folder = Path(held.enter_context(TemporaryFolder(root=root)))
            (folder / REPOSITORY).write_text(str(repository.folder))
        try:
            yield Worktrees(folder=folder, repository=repository)
        finally:
            _clear(folder)


def _link(package: Path, into: Path) -> None:
    for built in package.rglob("*.so"):
        there = into / built.relative_to(package)
        if there.parent.is_dir() and not there.exists():
            there.symlink_to(built)


def _clear(folder: Path) -> None:
    """Remove it, and its worktrees as git wants them removed."""
    for path in folder.glob("*/.git"):
        _remove(Repository(folder=Path((folder / REPOSITORY).read_text())), path.parent)
    shutil.rmtree(folder, ignore_errors=True)


def _remove(repository: Repository, path: Path) -> None:
    try:
        repository.git("worktree", "remove", "--force", "--force", str(path))
    except GitError:  # the repository itself may be gone
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Commits that touch the Python files, from one full id to another that contains it."""

    over: ClassVar[str] = "commits"
    repository: Repository
    old: str
    new: str
    direction: Direction

    @property
    def names(self) -> tuple[str, ...]:
        return (self.old, *self.repository.line([self.old], self.new))

    def middle_first(self, olds: Sequence[str], new: str) -> list[str]:
        others = [f"^{one}" for one in olds]
        text = self.repository.git("rev-list", "--bisect-all", new, *others, "--", PYTHON)
        found = (line.split()[0] for line in text.splitlines())
        return [one for one in found if one != new]

    def between(self, olds: Sequence[str], new: str) -> tuple[str, tuple[str, ...]]:
        inside = [one for one in olds if self.repository.contains(one, new)]
        old = min(inside, key=lambda one: len(self.repository.line([one], new)))
        return old, tuple(one for one in self.repository.line(inside, new) if one != new)

    def label(self, name: str) -> str:
        return name[:12]

    def title(self, name: str) -> str:
        return self.repository.title(name)


def checkout(path: Path) -> Repository:
    """The repository to search; UsageError if `path` is in none."""
    try:
        return open_repository(path)
    except GitError as error:
        raise UsageError(
            f"--repo {path}: not a git checkout ({str(error).splitlines()[0]})\n"
            "  name a local clone of SGLang, with its history and tags"
        ) from error


def commits(repository: Repository, *, bad: str, good: str) -> Commits:
    """The line between two commits of SGLang, one containing the other; UsageError otherwise."""
    is_bad, is_good = _commit(repository, "--bad", bad), _commit(repository, "--good", good)
    if is_bad == is_good:
        raise UsageError(f"--bad {bad} and --good {good} are the same commit {is_bad[:12]}\n  name two")
    if repository.contains(is_good, is_bad):
        return _narrowed(Commits(repository=repository, old=is_good, new=is_bad, direction="broken"))
    if repository.contains(is_bad, is_good):
        return _narrowed(Commits(repository=repository, old=is_bad, new=is_good, direction="fixed"))
    raise UsageError(
        f"neither of --bad {bad} and --good {good} contains the other, so there is no line of commits between them\n"
        + (
            f"  this clone is shallow, so the line may only be cut off:  git -C {repository.folder} fetch --unshallow"
            if repository.shallow()
            else f"  their last common commit:  git -C {repository.folder} merge-base {bad} {good}"
        )
    )


def _narrowed(line: Commits) -> Commits:
    """Its newer end moved back to the last commit that touches the Python files, which runs the same."""
    repository, touching = line.repository, line.names[1:]
    if not touching:
        raise UsageError(
            f"no commit between {line.label(line.old)} and {line.label(line.new)} touches {PYTHON}/, "
            "so both run the same\n  name commits further apart"
        )
    if repository.object_id(touching[-1], PYTHON) != repository.object_id(line.new, PYTHON):
        return line
    return Commits(repository=repository, old=line.old, new=touching[-1], direction=line.direction)


def _commit(repository: Repository, option: str, name: str) -> str:
    commit = repository.commit(name)
    if commit is None:
        git = f"git -C {repository.folder}"
        raise UsageError(
            f"{option} {name}: no such commit or tag in {repository.folder}\n"
            f"  see what there is:  {git} tag --list 'v*'; get more:  {git} fetch --tags"
            f"{' --unshallow' if repository.shallow() else ''}"
        )
    if repository.object_id(commit, PACKAGE) is None:
        raise UsageError(f"{option} {name}: not a commit of SGLang, it has no {PACKAGE}\n  name a clone of SGLang")
    return commit
