"""Worktrees of a checkout that is not ours, in a folder of our own, and the certainty that they go again.

A folder is held by a lock for as long as its process lives; what a killed one left is removed by the next. It must not
know what the trees are for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.bisect.repository import PYTHON, GitError, Repository, run_git
from harness.engines.closure import home

OWNER = "owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
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
def workshop(repository: Repository) -> Iterator[Workshop]:
    """A folder under EAGLECHECK_HOME, removed with every worktree in it."""
    root = home() / "bisect"
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    folder = root / f"{os.getpid()}-{secrets.token_hex(3)}"
    folder.mkdir()
    with (folder / OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(f"{repository.folder}\n")
        owner.flush()
        try:
            yield Workshop(folder=folder, repository=repository)
        finally:
            _clear(repository, folder)


def _link(package: Path, into: Path) -> None:
    for built in package.rglob("*.so"):
        there = into / built.relative_to(package)
        if there.parent.is_dir() and not there.exists():
            there.symlink_to(built)


def _sweep(root: Path) -> None:
    """Remove folders whose process is gone."""
    for folder in root.iterdir():
        try:
            with (folder / OWNER).open() as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(Repository(folder=Path(owner.read().strip())), folder)
        except OSError:  # held by a living one, or not whole yet
            continue


def _clear(repository: Repository, folder: Path) -> None:
    for path in folder.iterdir():
        if (path / ".git").is_file():
            _remove(repository, path)
    shutil.rmtree(folder, ignore_errors=True)


def _remove(repository: Repository, path: Path) -> None:
    try:
        run_git(repository.folder, "worktree", "remove", "--force", "--force", str(path))
    except GitError:  # the repository itself may be gone
        shutil.rmtree(path, ignore_errors=True)
