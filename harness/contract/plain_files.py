"""Reads regular files only, anything else is refused before it is opened; and writes them whole or not at all.

A named pipe would hold whoever opens it, /dev/zero never ends, and a device may act on being opened. Links to regular
files are followed. It must not know what the files hold.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

#: What else there is, by `stat`'s word for it.
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class NotPlainError(OSError):
    """Something that is no regular file; strerror says what it is."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}; expected a regular file", str(path))


def content(path: Path) -> bytes:
    """The bytes of a regular file in a folder. NotPlainError for anything else, which is not opened; OSError."""
    check(path)
    return path.read_bytes()


def replace(path: Path, content: bytes, *, sync: bool = False) -> None:
    """The file with this content. sync: on the disk before its name is, so that it survives a power cut."""
    with whole(path) as draft, draft.open("wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def draft_of(path: Path) -> Path:
    """The file beside a file that is written in its place."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write what is then moved into place: a reader sees the whole file or none, and no part of it stays."""
    draft = draft_of(path)
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:  # a full disk, or Ctrl-C
        draft.unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    """The digest of a regular file of any length, never held whole. Refused as by `content`."""
    check(path)
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def named(path: Path) -> bytes:
    """The bytes of a file that was named itself, where a pipe is meant as one: `--scenario-file <(…)`.

    NotPlainError for a named pipe that nobody has opened to write, OSError.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        return content(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:  # waits for no writer
        first = pipe.read(1)  # None: there is one, and nothing from it so far
        if first == b"" and path.resolve().is_fifo():  # a shell's `<(…)` has no name, and may be empty
            raise NotPlainError(path, "a named pipe that nobody writes to")
        os.set_blocking(pipe.fileno(), True)
        return (first or b"") + pipe.readall()


def check(path: Path) -> None:
    """NotPlainError for what is there and is no regular file, FileNotFoundError where nothing is."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise NotPlainError(path, KINDS.get(stat.S_IFMT(mode), "something else"))


def check_tree(folder: Path) -> None:
    """NotPlainError for the first thing at or below `folder` that is neither a folder nor a regular file.

    Before all of it is copied, or read by somebody else's code. A link to a folder may lead round in a circle.
    """
    for place, folders, files in os.walk(folder):
        for name in sorted(folders):
            if Path(place, name).is_symlink():
                raise NotPlainError(Path(place, name), "a link to a folder")
        for name in sorted(files):
            check(Path(place, name))
