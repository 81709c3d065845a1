"""The commits of a checkout as a line to search: which two ends can be searched between, and git's own middle.

History branches and merges, so what halves it best is git's to say (`git rev-list --bisect-all`). It must leave the
checkout as it is, and must not judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.bisect.repository import PACKAGE, PYTHON, GitError, Repository, open_repository
from harness.bisect.search import Direction
from harness.contract.usage import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Commits that touch the Python files, from one full id to another that contains it."""

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
        raise UsageError(
            f"{option} {name}: no such commit or tag in {repository.folder}\n"
            f"  see what there is:  git -C {repository.folder} tag --list 'v*'; get more:  git fetch --tags --unshallow"
        )
    if repository.object_id(commit, PACKAGE) is None:
        raise UsageError(f"{option} {name}: not a commit of SGLang, it has no {PACKAGE}\n  name a clone of SGLang")
    return commit
