"""What the files of a folder were when they were written: one SHA-256 each, in a file that `sha256sum -c` reads.

It must not know what the files hold. A folder of before these were kept has none, and is read as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

SUMS = "SHA256SUMS"
#: What to say of a file that has changed.
CHANGED = "other bytes than those that were written (their SHA-256 differs)"


def digest(content: bytes) -> str:
    """SHA-256 in hex digits."""
    return hashlib.sha256(content).hexdigest()


def sums_of(folder: Path, files: Iterable[Path], *, also: Mapping[str, bytes]) -> bytes:
    """The content of SUMS for these files, by their paths in `folder`; also: what will be written after it."""
    found = {file.relative_to(folder).as_posix(): digest(file.read_bytes()) for file in files}
    found |= {name: digest(content) for name, content in also.items()}
    return "".join(f"{value}  {name}\n" for name, value in sorted(found.items())).encode()


def read_sums(folder: Path) -> dict[str, str]:
    """Path in the folder -> digest; empty where the folder has no SUMS. A line that is none is left out."""
    try:
        text = (folder / SUMS).read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition("  ") for line in text.splitlines())
    return {name: value for value, _, name in lines if name}


def changed(folder: Path, file: Path, content: bytes) -> bool:
    """Whether a file of the folder is not what was written; where digests are kept, every file has one."""
    written = read_sums(folder)
    return bool(written) and written.get(file.relative_to(folder).as_posix()) != digest(content)
