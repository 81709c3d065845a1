"""A bundle's files, written and read.

One uncompressed tar: a manifest whose name holds its own hash, then one .tar.xz an archive (xz, since that is what
Python 3.12's standard library opens). Where no file may be larger than so many bytes there are several such tars: each
has the manifest, and archives are cut where a file is full. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from harness.contract import plain_files
from harness.machines.bundle import AGAIN, Archive, BundleError, Manifest, Piece, parse

#: Every packed file carries this time, so that the same wheels give the same bytes, and no source looks newer than what
#: was compiled from it.
ATTEMPT = 1_600_000_000
BLOCK = 1 << 20
#: What the manifest and the tar headers may take of a file of limited size.
RESERVE = 1 << 19


def write(path: Path, manifest: Manifest, archives: Path, *, limit: int = 0) -> Manifest:
    """Put manifest and archives (files `<name>.tar.xz` in the folder) into one file, or into several of at most `limit`
    bytes, named `<path>.1of3`; each appears whole or not at all. The manifest that was written."""
    if limit:
        manifest = _cut(manifest, archives, path.name, limit=limit)
    text = manifest.to_json().encode()
    for number, name in enumerate(manifest.files or (path.name,)):
        with plain_files.whole(path.with_name(name)) as draft, tarfile.open(draft, "w") as bundle:
            which = f"-{number}" if manifest.files else ""
            title = f"manifest-{hashlib.sha256(text).hexdigest()}{which}.json"
            bundle.addfile(plain_member(title, size=len(text)), io.BytesIO(text))
            for archive in manifest.archives:
                at = 0
                for piece in archive.cut():
                    if piece.file == number:
                        with (archives / archive.member).open("rb") as source:
                            source.seek(at)
                            bundle.addfile(plain_member(piece.member, size=piece.size), source)
                    at += piece.size
    return manifest


def _cut(manifest: Manifest, archives: Path, name: str, *, limit: int) -> Manifest:
    """The manifest with every archive cut so that no file takes more than `limit` bytes with what else is in it."""
    room, file, cut = limit - RESERVE, 0, []
    for archive in manifest.archives:
        pieces: list[Piece] = []
        with (archives / archive.member).open("rb") as source:
            left = archive.size
            while left:
                if not room:
                    room, file = limit - RESERVE, file + 1
                size = min(left, room)
                member = f"{archive.member}.{len(pieces)}"
                digest = hashlib.sha256(source.read(size)).hexdigest()
                pieces.append(Piece(member=member, file=file, sha256=digest, size=size))
                left, room = left - size, room - size
        cut.append(replace(archive, pieces=tuple(pieces)))
    files = tuple(f"{name}.{number + 1}of{file + 1}" for number in range(file + 1))
    return replace(manifest, archives=tuple(cut), files=files)


def plain_member(name: str, *, size: int, mode: int = 0o644) -> tarfile.TarInfo:
    """A tar header that says nothing of who packed it or when."""
    header = tarfile.TarInfo(name)
    header.size, header.mode, header.mtime = size, mode, ATTEMPT
    return header


class _File:
    """One open file of a bundle, whose manifest has been checked."""

    def __init__(self, path: Path, bundle: tarfile.TarFile) -> None:
        self.path = path
        self._bundle = bundle
        first = bundle.next()
        if first is None or not first.name.startswith("manifest-"):
            raise BundleError(
                f"{path} is not a bundle of eaglecheck: it does not begin with a manifest",
                next_step="make one:  eaglecheck engines pack VERSION --output FILE",
            )
        self.text = _member(bundle, first).read()
        title = f"manifest-{hashlib.sha256(self.text).hexdigest()}"
        if not first.name.startswith(title):
            raise BundleError(f"{path} is damaged: its manifest has another hash", next_step=AGAIN)
        self.manifest = parse(self.text.decode())
        self.number = int(first.name.removeprefix(title).removesuffix(".json").removeprefix("-") or 0)

    def copy(self, piece: Piece, target: IO[bytes]) -> None:
        """Append a piece to what is open, and check its hash on the way."""
        digest = hashlib.sha256()
        again = f"copy the file again, or {self.manifest.again()}"
        try:
            source = _member(self._bundle, self._bundle.getmember(piece.member))
            while block := source.read(BLOCK):
                digest.update(block)
                target.write(block)
        except (KeyError, tarfile.TarError) as error:
            raise BundleError(f"{self.path} is cut off: {piece.member} is not whole", next_step=again) from error
        if digest.hexdigest() != piece.sha256:
            raise BundleError(
                f"{self.path} is damaged: {piece.member} has sha256 {digest.hexdigest()[:12]}…, not "
                f"{piece.sha256[:12]}…",
                next_step=again,
            )


class Reader:
    """An open bundle; use `opened`. A file that holds nothing that is wanted may be missing."""

    def __init__(self, files: Sequence[_File]) -> None:
        self.manifest = files[0].manifest
        self._files = {file.number: file for file in files}

    def check_there(self, archives: Sequence[Archive]) -> None:
        """BundleError naming the files that hold these and are missing."""
        wanted = {piece.file for archive in archives for piece in archive.cut()}
        absent = [self.manifest.files[number] for number in sorted(wanted - set(self._files))]
        if absent:
            raise BundleError(
                f"this bundle lies in {len(self.manifest.files)} files, of which {', '.join(absent)} was not named",
                next_step="name them all, in any order:  python3 -m harness.machines.unpack FILES",
            )

    def save(self, archive: Archive, target: Path) -> None:
        """Write one archive to a file, with its hashes checked; BundleError names the file that is damaged."""
        with target.open("wb") as joined:
            for piece in archive.cut():
                self._files[piece.file].copy(piece, joined)


def _member(bundle: tarfile.TarFile, header: tarfile.TarInfo) -> IO[bytes]:
    source = bundle.extractfile(header)
    if source is None:
        raise BundleError(f"{bundle.name!r} is damaged: {header.name} is no file", next_step=AGAIN)
    return source


def grouped(paths: Sequence[Path]) -> tuple[tuple[Path, ...], ...]:
    """The files of each bundle among these, and the bundles so that what adds to another comes after it."""
    bundles: dict[bytes, list[Path]] = {}
    kinds: dict[bytes, int] = {}
    for path in paths:
        with contextlib.ExitStack() as stack:
            file = _opened(path, stack)
        bundles.setdefault(file.text, []).append(path)
        kinds[file.text] = 0 if file.manifest.releases else 2 if file.manifest.home else 1
    return tuple(tuple(bundles[text]) for text in sorted(bundles, key=lambda text: kinds[text]))


@contextlib.contextmanager
def opened(*paths: Path) -> Iterator[Reader]:
    """The bundle of these files, ready to be read; BundleError where there is none."""
    with contextlib.ExitStack() as stack:
        yield Reader([_opened(path, stack) for path in paths])


def _opened(path: Path, stack: contextlib.ExitStack) -> _File:
    try:
        plain_files.check(path)  # it is read back and forth
        return _File(path, stack.enter_context(tarfile.open(path, "r:")))
    except OSError as error:
        raise BundleError(
            f"cannot read {path}: {error.strerror or error}",
            next_step="name a file that `engines pack` or `--keep-kernels` made",
        ) from error
    except tarfile.TarError as error:
        raise BundleError(f"{path} is cut off, or no bundle of eaglecheck ({error})", next_step=AGAIN) from error
