"""Kernels that this machine has compiled, as a bundle of their own: the next fresh machine need not compile them again.

Their caches are keyed by absolute paths and modification times, so they fit only an installation in the same place made
from the same parts. Standard library only, like everything that unpacks.

This module must not compile anything.
"""

from __future__ import annotations

import lzma
import shutil
import tarfile
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


def folder() -> Path:
    return dependencies.home() / "kernels"


def save(path: Path, *, progress: Progress) -> Manifest:
    """Write what has been compiled so far to a bundle at `path`; EnvError if there is nothing, or no release to fit."""
    files = sorted(one for one in folder().rglob("*") if one.is_file() and one.suffix not in LEFT_OUT)
    markers = [dependencies.read_marker(one) or {} for one in sorted((dependencies.home() / "engines").glob("*"))]
    made_for = next((marker for marker in markers if "trees" in marker), None)
    if not files or made_for is None:
        raise EnvError(
            f"no kernels have been compiled in {folder()}",
            next_step="compile them:  eaglecheck engines unpack FILE --warm",
        )
    content = [(str(one.relative_to(folder())), one.read_bytes()) for one in files]
    name = bundle.tree_name("kernels", content)
    work = dependencies.home() / f".{name}"
    work.mkdir(parents=True, exist_ok=True)
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
    shutil.rmtree(work)
    progress(f"{path}: {len(files)} files of compiled kernels, {path.stat().st_size / 2**20:.1f} MiB")
    return manifest


def restore(reader: Reader, *, progress: Progress) -> None:
    """Put saved kernels back; BundleError where this installation is in another place than theirs."""
    manifest = reader.manifest
    if manifest.home != str(dependencies.home()):
        raise BundleError(
            f"these kernels were compiled for an installation in {manifest.home}, this one is in {dependencies.home()}",
            next_step=f"put it there:  export EAGLECHECK_HOME={manifest.home}",
        )
    (archive,) = manifest.archives
    done = folder() / f".{archive.name}"
    if done.exists():
        progress("these kernels are in place already")
        return
    folder().mkdir(parents=True, exist_ok=True)
    packed = folder() / archive.member
    reader.save(archive, packed)
    incoming = folder() / f".{archive.name}.partial"
    shutil.rmtree(incoming, ignore_errors=True)
    with tarfile.open(packed, "r:xz") as source:
        source.extractall(incoming, filter="data")
    packed.unlink()
    _place(incoming, folder())
    shutil.rmtree(incoming)
    done.touch()
    progress(f"{manifest.trees[0].files} files of compiled kernels are in place")


def _place(incoming: Path, there: Path) -> None:
    """Move in each folder that is not there yet, as a whole: an engine may compile into one that is.

    Of a ninja that finds its log only when it is done, both write one; ninja 1.13 reads neither, and compiles for good.
    """
    for one in incoming.iterdir():
        if not one.is_dir():
            continue
        if (there / one.name).exists():
            _place(one, there / one.name)
        else:
            one.rename(there / one.name)
