"""What changed in the speculative files between two Python trees of SGLang. It must not import or run any of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.bisect.repository import PYTHON, Repository

#: Files that speculative decoding is made of, wherever a release keeps them.
SPECULATIVE = re.compile(r"speculative|eagle|nextn|_mtp|spec_(info|utils|decod)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One file and how many lines came and went. state: what became of the file itself."""

    path: str
    added: int
    removed: int
    state: str = "changed"


def changed_files(old: Path, new: Path) -> tuple[Changed, ...]:
    """Speculative files that differ between two `sglang` package folders, those in both first, most changed first."""
    before, after = _files(old), _files(new)
    found = (_compare(name, before.get(name), after.get(name)) for name in sorted({*before, *after}))
    return tuple(sorted(filter(None, found), key=_order))


def on_the_path(changed: Sequence[Changed], files: Sequence[str]) -> tuple[Changed, ...]:
    """The same with these files first: what made the value that is first wrong, and what read it."""
    return tuple(sorted(changed, key=lambda one: files.index(one.path) if one.path in files else len(files)))


def changed_between(repository: Repository, old: str, new: str) -> tuple[Changed, ...]:
    """The same between two commits, as git counts."""
    found = [
        Changed(
            path=path.removeprefix(f"{PYTHON}/"),
            added=int(added),
            removed=int(removed),
            state=_state(repository, old, new, path),
        )
        for added, removed, path in repository.numstat(old, new)
        if path.endswith(".py") and _speculative(path)
    ]
    return tuple(sorted(found, key=_order))


def _state(repository: Repository, old: str, new: str, path: str) -> str:
    if repository.object_id(old, path) is None:
        return "added"
    return "changed" if repository.object_id(new, path) is not None else "removed"


def _speculative(path: str) -> bool:
    return bool(SPECULATIVE.search(path)) and "/test" not in f"/{path}"


def _order(one: Changed) -> tuple[bool, int, str]:
    return one.state != "changed", -(one.added + one.removed), one.path


def _files(package: Path) -> Mapping[str, Path]:
    found = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    return {name: path for name, path in found.items() if _speculative(name)}


def _compare(name: str, old: Path | None, new: Path | None) -> Changed | None:
    before, after = _lines(old), _lines(new)
    if old is not None and new is not None and before == after:
        return None
    added, removed = _counts(before, after)
    state = "added" if old is None else "removed" if new is None else "changed"
    return Changed(path=f"sglang/{name}", added=added, removed=removed, state=state)


def _lines(path: Path | None) -> list[str]:
    return [] if path is None else path.read_text(errors="replace").splitlines()


def _counts(before: list[str], after: list[str]) -> tuple[int, int]:
    added = removed = 0
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            removed += i2 - i1
            added += j2 - j1
    return added, removed
