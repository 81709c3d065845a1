"""Kernels that this machine has compiled, as a bundle of their own: the next fresh machine need not compile them again.

Their caches are keyed by absolute paths and modification times, so they fit only an installation in the same place made
from the same parts. Standard library only, like everything that unpacks.

This module must not compile anything.
"""

from __future__ import annotations

import errno
import lzma
import os
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path

from harness.contract import plain_files
from harness.engines import dependencies
from harness.engines.dependencies import EnvError, Progress
from harness.machines import bundle, bundle_files
from harness.machines.bundle import Archive, BundleError, Manifest, Tree
from harness.machines.bundle_files import Reader

#: Not worth their bytes, or of one process only.
LEFT_OUT = (".lock", ".log", ".partial")
XZ_PRESET = 6
#: A rename that found something in its place.
IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def folder() -> Path:
    return dependencies.home() / "kernels"


def save(path: Path, *, progress: Progress) -> Manifest:
    """Write what has been compiled so far to a bundle at `path`; EnvError if there is nothing, or no release to fit."""
    with dependencies.installing("unpack", progress), dependencies.workplace() as work:
        return _save(path, work, progress)


def _save(path: Path, work: Path, progress: Progress) -> Manifest:
    # Caches are folders; what else lies beside them is not an engine's.
    files = sorted(one for cache in folder().glob("[!.]*/") for one in _files(cache) if _is_kept(one))
    markers = [dependencies.read_marker(one) or {} for one in sorted((dependencies.home() / "engines").glob("*"))]
    made_for = next((marker for marker in markers if "trees" in marker), None)
    if not files or made_for is None:
        raise EnvError(
            f"no kernels have been compiled in {folder()}",
            next_step="compile them:  eaglecheck engines unpack FILE --warm",
        )
    content = [(str(one.relative_to(folder())), one.read_bytes()) for one in files]
    name = bundle.tree_name("kernels", content)
    packed = work / f"{name}.tar.xz"
    with lzma.open(packed, "wb", preset=XZ_PRESET) as target, tarfile.open(fileobj=target, mode="w") as archive:
        for one in files:
            header = archive.gettarinfo(one, arcname=str(one.relative_to(folder())))
            # Whole seconds, downwards and for all alike: what was older stays older, and nothing looks changed.
            header.mtime = int(header.mtime)
            header.uid = header.gid = 0
            header.uname = header.gname = ""
            with one.open("rb") as source:
                archive.addfile(header, source)
    member = Archive(name=name, sha256=plain_files.sha256(packed), size=packed.stat().st_size)
    size = sum(one.stat().st_size for one in files)
    manifest = Manifest(
        python=made_for["python"],
        torch=made_for.get("machine_torch", made_for["torch"]),
        glibc="2.17",
        cuda_arch=made_for["cuda_arch"],
        expects=(),
        control=(),
        releases=(),
        trees=(Tree(name=name, archive=name, files=len(files), size=size),),
        archives=(member,),
        home=str(dependencies.home()),
    )
    bundle_files.write(path, manifest, work)
    progress(f"{path}: {len(files)} files of compiled kernels, {path.stat().st_size / 2**20:.1f} MiB")
    return manifest


def restore(reader: Reader, work: Path, *, progress: Progress) -> None:
    """Put saved kernels back where none are, by way of the folder `work` on the same disk.

    BundleError where this installation is in another place than theirs.
    """
    manifest = reader.manifest
    if manifest.home != str(dependencies.home()):
        raise BundleError(
            f"these kernels were compiled for an installation in {manifest.home}, this one is in {dependencies.home()}",
            next_step=f"put it there:  export EAGLECHECK_HOME={shlex.quote(manifest.home)}",
        )
    (archive,) = manifest.archives
    packed, incoming = work / archive.member, work / "kernels"
    reader.save(archive, packed)
    with tarfile.open(packed, "r:xz") as source:
        source.extractall(incoming, filter="data")
    brought = sum(1 for _ in _files(incoming))
    folder().mkdir(parents=True, exist_ok=True)
    _place(incoming, folder())
    left = sum(1 for _ in _files(incoming))
    progress(f"{brought - left} files of compiled kernels placed, {left} left out: their kernels are there already")


def _place(incoming: Path, there: Path) -> None:
    """Move in what is not there yet, and leave the rest in `incoming`.

    A kernel goes in as a whole or not at all: an engine may compile into the one that is there. Of a ninja that finds
    its log only when it is done, both write one; ninja 1.13 reads neither, and compiles for good. Folders of kernels
    are merged. inductor's folders of independent files count as kernels: what is left out there is compiled again.
    """
    for one in incoming.iterdir():
        target = there / one.name
        if one.is_dir() and target.is_dir() and _holds_kernels(target, one):
            _place(one, target)
        elif one.is_dir() or not os.path.lexists(target):
            _move(one, target)


def _holds_kernels(target: Path, one: Path) -> bool:
    """Whether the folder `target`, for which `one` comes, has kernels in it and is not itself one.

    A kernel has files of its own. One without any is a kernel that has just been begun, if `one` is a kernel.
    """
    if any(_is_kept(path) for path in target.iterdir() if not path.is_dir()):
        return False
    return any(path.is_dir() for path in target.iterdir()) or all(path.is_dir() for path in one.iterdir())


def _move(source: Path, target: Path) -> None:
    """Into a place that is free, or an empty folder; it stays where another process was faster."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in IN_THE_WAY:
            raise


def _is_kept(path: Path) -> bool:
    return path.name != "lock" and path.suffix not in LEFT_OUT


def _files(place: Path) -> Iterator[Path]:
    return (one for one in place.rglob("*") if one.is_file())
