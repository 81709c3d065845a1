"""What changed in the speculative files between two Python trees of SGLang. It must not import or run any of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bisect.repository import PYTHON, Repository

#: Files that speculative decoding is made of, wherever a release keeps them.
SPECULATIVE = re.compile(r"speculative|eagle|nextn|_mtp|spec_(info|utils|decod)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One file and how many lines came and went. state: what became of the file itself.

    on_path: whether it made the value that is first wrong, or read it.
    """

    path: str
    added: int
    removed: int
    state: str = "changed"
    on_path: bool = False


def changed_files(old: Path, new: Path, *, path: Sequence[str] = ()) -> tuple[Changed, ...]:
    """Speculative files that differ between two `sglang` package folders, those in both first, most changed first.

    path: the files, as sglang/srt/…, that made and read the value first seen wrong; they come first.
    """
    before, after = _files(old, path), _files(new, path)
    found = (_compare(name, before.get(name), after.get(name)) for name in sorted({*before, *after}))
    return _sorted(filter(None, found), path)


def changed_between(repository: Repository, old: str, new: str, *, path: Sequence[str] = ()) -> tuple[Changed, ...]:
    """The same between two commits, as git counts."""
    found = [
        Changed(
            path=name.removeprefix(f"{PYTHON}/"),
            added=int(added),
            removed=int(removed),
            state=_state(repository, old, new, name),
        )
        for added, removed, name in repository.numstat(old, new)
        if name.endswith(".py") and (_speculative(name) or name.removeprefix(f"{PYTHON}/") in path)
    ]
    return _sorted(found, path)


def _state(repository: Repository, old: str, new: str, path: str) -> str:
    if repository.object_id(old, path) is None:
        return "added"
    return "changed" if repository.object_id(new, path) is not None else "removed"


def _speculative(path: str) -> bool:
    return bool(SPECULATIVE.search(path)) and "/test" not in f"/{path}"


def _sorted(changed: Iterable[Changed], path: Sequence[str]) -> tuple[Changed, ...]:
    def order(one: Changed) -> tuple[int, bool, int, str]:
        at = path.index(one.path) if one.on_path else len(path)
        return at, one.state != "changed", -(one.added + one.removed), one.path

    return tuple(sorted((replace(one, on_path=one.path in path) for one in changed), key=order))


def _files(package: Path, path: Sequence[str]) -> Mapping[str, Path]:
    found = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    return {name: file for name, file in found.items() if _speculative(name) or f"sglang/{name}" in path}


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
