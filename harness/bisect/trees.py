"""Worktrees of a checkout that is not ours, in a folder of our own, and the certainty that they go again.

What a killed search left is removed by the next. It must not know what the trees are for.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.bisect.repository import PYTHON, GitError, Repository, run_git
from harness.engines.dependencies import home
from harness.engines.temporary_folders import TemporaryFolder, abandoned

#: Beside the worktrees: a file with the folder of their repository.
REPOSITORY = "repository"


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
    root.mkdir(parents=True, exist_ok=True)
    with abandoned(root) as found:
        for folder in found:
            _clear(folder)
    with TemporaryFolder(root=root) as name:
        folder = Path(name)
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
        run_git(repository.folder, "worktree", "remove", "--force", "--force", str(path))
    except GitError:  # the repository itself may be gone
        shutil.rmtree(path, ignore_errors=True)
