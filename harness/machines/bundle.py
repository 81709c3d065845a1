"""The bundle file that carries SGLang releases to a machine without a network: manifest, reading and writing.

One uncompressed tar: a manifest whose name holds its own hash, then one .tar.xz an archive (xz, since that is what
Python 3.12's standard library opens). An archive holds whole trees; a tree is one folder for an import path, named
after its content. Standard library only: the machine that unpacks it may have no pydantic yet.

This module must not know what a tree is for (see `harness.machines.slimming`) nor where it goes (see
`harness.machines.unpack`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import IO, Any, get_args, get_origin, get_type_hints

from harness.contract import plain_files
from harness.engines.closure import EnvError

FORMAT = 1
#: Every packed file carries this time, so that the same wheels give the same bytes, and no source looks newer than what
#: was compiled from it.
ATTEMPT = 1_600_000_000
BLOCK = 1 << 20


class BundleError(EnvError):
    """A bundle file cannot be read, is damaged, or does not fit this machine."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One published file that went into a tree, as it came from the index."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slimmed:
    """What one rule left out of a tree; sizes in bytes, unpacked."""

    pattern: str
    reason: str
    files: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One folder for an import path. `name` ends in a hash of what is in it; `size` in bytes, unpacked.

    into: trees of another bundle that these files are added to; empty for a tree that stands for itself.
    """

    name: str
    archive: str
    files: int
    size: int
    wheels: tuple[Wheel, ...] = ()
    slimmed: tuple[Slimmed, ...] = ()
    into: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One compressed member of the bundle."""

    name: str
    sha256: str
    size: int

    @property
    def member(self) -> str:
        return f"{self.name}.tar.xz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a release does not get what it asks for."""

    name: str
    wanted: str
    carried: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One SGLang release: its trees in import order, and what must be in its environment."""

    version: str
    trees: tuple[str, ...]
    environ: dict[str, str]
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a bundle holds, and what the machine must have.

    expects: packages that the machine's own Python brings, as 'name' or 'name<2'. home: set where the bundle holds
    compiled kernels instead of releases, and fits an installation in that folder only (see `harness.machines.kernels`).
    """

    python: str
    torch: str
    glibc: str
    cuda_arch: str
    expects: tuple[str, ...]
    control: tuple[str, ...]
    releases: tuple[Release, ...]
    trees: tuple[Tree, ...]
    archives: tuple[Archive, ...]
    home: str = ""
    format: int = FORMAT

    def tree(self, name: str) -> Tree:
        return next(tree for tree in self.trees if tree.name == name)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def parse(text: str) -> Manifest:
    """The manifest from its JSON; BundleError where it is of another format or not whole."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise BundleError(
                f"this bundle has format {data['format']}, this checkout reads {FORMAT}",
                next_step="unpack it with the checkout that packed it, or pack again:  "
                "eaglecheck engines pack VERSION --output FILE",
            )
        manifest: Manifest = _record(Manifest, data)
        return manifest
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(f"the bundle's manifest is not whole ({error!r})", next_step=AGAIN) from error


AGAIN = "copy the file again, or pack it again:  eaglecheck engines pack VERSION --output FILE"


def _record(kind: Any, value: Any) -> Any:
    """A value of this type from its JSON; TypeError or KeyError where it is another."""
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: _record(types[name], one) for name, one in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_record(get_args(kind)[0], one) for one in value)
    if not isinstance(value, get_origin(kind) or kind):
        raise TypeError(f"{value!r} is no {kind}")
    return value


def write(path: Path, manifest: Manifest, archives: Path) -> None:
    """Put manifest and archives (files `<name>.tar.xz` in the folder) into one file; it appears whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    text = manifest.to_json().encode()
    with tarfile.open(partial, "w") as bundle:
        header = plain_member(f"manifest-{hashlib.sha256(text).hexdigest()}.json", size=len(text))
        bundle.addfile(header, io.BytesIO(text))
        for archive in manifest.archives:
            with (archives / archive.member).open("rb") as source:
                bundle.addfile(plain_member(archive.member, size=archive.size), source)
    partial.replace(path)


def plain_member(name: str, *, size: int, mode: int = 0o644) -> tarfile.TarInfo:
    """A tar header that says nothing of who packed it or when."""
    header = tarfile.TarInfo(name)
    header.size, header.mode, header.mtime = size, mode, ATTEMPT
    return header


class Reader:
    """An open bundle whose manifest has been checked; use `opened`."""

    def __init__(self, path: Path, bundle: tarfile.TarFile) -> None:
        self.path = path
        self._bundle = bundle
        self.manifest = self._read_manifest()

    def _read_manifest(self) -> Manifest:
        first = self._bundle.next()
        if first is None or not first.name.startswith("manifest-"):
            raise BundleError(
                f"{self.path} is not a bundle of eaglecheck: it does not begin with a manifest",
                next_step="make one:  eaglecheck engines pack VERSION --output FILE",
            )
        text = _member(self._bundle, first).read()
        if first.name != f"manifest-{hashlib.sha256(text).hexdigest()}.json":
            raise BundleError(f"{self.path} is damaged: its manifest has another hash", next_step=AGAIN)
        return parse(text.decode())

    def archive(self, archive: Archive) -> IO[bytes]:
        """The bytes of one archive, once its hash has been checked; BundleError where it differs."""
        try:
            source = _member(self._bundle, self._bundle.getmember(archive.member))
            digest = digest_of(source)
        except (KeyError, OSError, tarfile.TarError) as error:
            raise BundleError(f"{self.path} is cut off: {archive.member} is not whole", next_step=AGAIN) from error
        if digest != archive.sha256:
            raise BundleError(
                f"{self.path} is damaged: {archive.member} has sha256 {digest[:12]}…, not {archive.sha256[:12]}…",
                next_step=AGAIN,
            )
        source.seek(0)
        return source


def _member(bundle: tarfile.TarFile, header: tarfile.TarInfo) -> IO[bytes]:
    source = bundle.extractfile(header)
    if source is None:
        raise BundleError(f"{bundle.name!r} is damaged: {header.name} is no file", next_step=AGAIN)
    return source


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Reader]:
    """The bundle, ready to be read; BundleError where there is none."""
    with contextlib.ExitStack() as stack:
        try:
            plain_files.check(path)  # it is read back and forth
            reader = Reader(path, stack.enter_context(tarfile.open(path, "r:")))
        except OSError as error:
            raise BundleError(
                f"cannot read {path}: {error.strerror or error}", next_step="name the file that `engines pack` made"
            ) from error
        except tarfile.TarError as error:
            raise BundleError(f"{path} is cut off, or no bundle of eaglecheck ({error})", next_step=AGAIN) from error
        yield reader


def digest_of(source: IO[bytes]) -> str:
    """SHA-256 of everything that is left to read, in hexadecimal."""
    digest = hashlib.sha256()
    while block := source.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


def tree_name(stem: str, files: Sequence[tuple[str, bytes]]) -> str:
    """`stem` and a hash over (path, content) of its files, so that a changed tree never passes for the old one."""
    digest = hashlib.sha256()
    for path, content in sorted(files):
        digest.update(f"{path}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return f"{stem}-{digest.hexdigest()[:10]}"
