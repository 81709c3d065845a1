"""Which eaglecheck this is: its version, its commit, and a digest of what drives and judges.

It must not say anything of SGLang, nor of what a user has changed elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.contract import finding_pages

ROOT = Path(__file__).parents[2]
#: The folders of ROOT that what is driven and judged depends on, and those in them that only tests read.
OF_SOURCE, OF_TESTS = ("cases", "harness", "reference"), ("cases/engine", "cases/meta", "cases/recorded")


def own_version() -> str:
    from harness.engines.dependencies import version_here  # which `eaglecheck --help` need not wait for

    return version_here("eaglecheck") or "unknown"


def git_state() -> tuple[str, bool | None]:
    """Head and dirtiness of our own checkout; empty where eaglecheck does not run from one."""
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__))]
    try:
        head, status = (
            subprocess.run([*git, *asked], capture_output=True, text=True, timeout=5, check=False)
            for asked in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", None
    return ("", None) if head.returncode else (head.stdout.strip(), bool(status.stdout.strip()))


def source_digest(root: Path = ROOT, pages: Path = finding_pages.FOLDER) -> str:
    """SHA-256 in hex digits of the names and contents of our own files below `root`, and of the pages of findings.

    It tells two states apart where neither has a commit, and a changed checkout from its commit.
    """
    found = hashlib.sha256()
    for name, file in sorted((file.relative_to(root).as_posix(), file) for file in _source_files(root)):
        found.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for page in sorted(pages.glob("F-*.md")):
        found.update(f"{page.name}\0{hashlib.sha256(page.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def _source_files(root: Path) -> Iterator[Path]:
    left_out = {root / name for name in OF_TESTS}
    for folder in OF_SOURCE:
        for here, inside, files in os.walk(root / folder):
            inside[:] = [name for name in inside if name != "__pycache__" and Path(here, name) not in left_out]
            yield from (Path(here, name) for name in files)
