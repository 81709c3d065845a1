"""SHA-256 digests of the files of a folder, in a file that `sha256sum -c` reads.

It must not know what the files hold. A folder of before these were kept has none, and is read as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.contract import plain_files

SUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (.+)")
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
        text = plain_files.content(folder / SUMS).decode(errors="replace")
    except OSError:
        return {}
    return {found[2]: found[1] for line in text.splitlines() if (found := LINE.fullmatch(line))}


def unreadable(folder: Path, written: Mapping[str, str]) -> bool:
    """Whether something is there in the name of SUMS, and says nothing. written: what `read_sums` found in it."""
    return not written and os.path.lexists(folder / SUMS)


def silent(written: Mapping[str, str], name: str) -> bool:
    """Whether a folder's digests leave out a file of it; where they are kept, every file has one."""
    return bool(written) and name not in written


def changed(written: Mapping[str, str], name: str, content: bytes) -> bool:
    """Whether a file of a folder is not what was written, as far as its digests show."""
    return name in written and written[name] != digest(content)
