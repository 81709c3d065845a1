"""The manifest of a bundle, which carries SGLang releases to a machine without a network.

A bundle holds archives; an archive holds whole trees; a tree is one folder for an import path, named after its content.
Standard library only: the machine that unpacks it may have no pydantic yet. This module must not know what a tree is
for (see `harness.machines.bundle_contents`), nor where it goes (see `harness.machines.unpack`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from harness.engines.dependencies import EnvError

FORMAT = 2
#: Format 1 has no torch of its own and lies in one file.
READABLE = (1, 2)


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
class LeftOut:
    """What one rule left out of a tree; sizes in bytes, unpacked."""

    pattern: str
    reason: str
    files: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One folder for an import path. `name` ends in a hash of what is in it; `size` in bytes, unpacked.

    into: trees of another bundle that these files are added to; empty for a tree that stands for itself.
    machine: folders that lie beside the machine's own torch, and are linked into the tree where it has none of its own.
    stands_for: packages that this tree only pretends to be, since they are imported and never used.
    """

    name: str
    archive: str
    files: int
    size: int
    wheels: tuple[Wheel, ...] = ()
    slimmed: tuple[LeftOut, ...] = ()
    into: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    stands_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of an archive's bytes in one of the bundle's files (0 is the first)."""

    member: str
    file: int
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One compressed archive; pieces: how it is cut, in order, empty where it lies whole in the only file.

    part_of: the archive that a tree names, where its large files are in archives of their own, such as this.
    """

    name: str
    sha256: str
    size: int
    pieces: tuple[Piece, ...] = ()
    part_of: str = ""

    @property
    def member(self) -> str:
        return f"{self.name}.tar.xz"

    def cut(self) -> tuple[Piece, ...]:
        return self.pieces or (Piece(member=self.member, file=0, sha256=self.sha256, size=self.size),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a release does not get what it asks for."""

    name: str
    wanted: str
    carried: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One SGLang release: its trees in import order, and what must be in its environment.

    torch: the build that is among its trees; empty where it runs on the machine's own. programs: settings that name a
    program of the machine (TRITON_PTXAS_PATH: ptxas).
    """

    version: str
    trees: tuple[str, ...]
    environ: dict[str, str]
    differences: tuple[Difference, ...] = ()
    torch: str = ""
    programs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a bundle holds, and what the machine must have.

    torch: the machine's own. expects: packages that its own Python brings, as 'name' or 'name<2'. home: set where the
    bundle holds compiled kernels instead of releases, and fits an installation in that folder only (see
    `harness.machines.kernels`). files: the names of a bundle of several files.
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
    files: tuple[str, ...] = ()
    format: int = FORMAT

    def tree(self, name: str) -> Tree:
        return next(tree for tree in self.trees if tree.name == name)

    def again(self, options: str = "") -> str:
        """How to make another bundle of the same; options: what `engines pack` needs beside the releases."""
        if self.home:
            return KERNELS
        versions = " ".join(release.version for release in self.releases) or "VERSION"
        return f"pack one where an index is:  eaglecheck engines pack {versions} --output FILE {options}".rstrip()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def parse(text: str) -> Manifest:
    """The manifest from its JSON; BundleError where it is of another format or not whole."""
    try:
        data = json.loads(text)
        if data["format"] not in READABLE:
            raise BundleError(
                f"this bundle has format {data['format']}, this checkout reads {' and '.join(map(str, READABLE))}",
                next_step="unpack it with the checkout that packed it, or pack again:  "
                "eaglecheck engines pack VERSION --output FILE",
            )
        manifest: Manifest = _record(Manifest, data)
        return manifest
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(f"the bundle's manifest is not whole ({error!r})", next_step=AGAIN) from error


KERNELS = "compile them anew:  eaglecheck engines unpack RELEASES --warm --keep-kernels FILE"
#: Where nothing is known of a file.
AGAIN = (
    "copy the file again, or pack it again:  eaglecheck engines pack VERSION --output FILE\n"
    f"  if it holds kernels, {KERNELS}"
)


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


def tree_name(stem: str, files: Sequence[tuple[str, bytes]]) -> str:
    """`stem` and a hash over (path, content) of its files, so that a changed tree never passes for the old one."""
    digest = hashlib.sha256()
    for path, content in sorted(files):
        digest.update(f"{path}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return f"{stem}-{digest.hexdigest()[:10]}"
