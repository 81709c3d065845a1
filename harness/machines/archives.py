"""The archives of a bundle: which files go into which, in what order, and compressed on all cores."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import shutil
import tarfile
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from harness.archive.faults import room
from harness.contract import plain_files
from harness.machines import bundle_files
from harness.machines.bundle import Archive, Manifest
from harness.machines.wheels import Job

#: The window is wide enough to see that kernels of neighbouring releases, and of neighbouring shapes, are alike.
XZ_PRESET = 6
XZ_WINDOW = 1 << 27
#: Archives of so many bytes, unpacked, are kept once they are compressed: half a minute or more.
KEEP = 1 << 27
LARGE = 1 << 26
WORKERS = os.cpu_count() or 1
#: What lies in such a folder of a wheel is started.
PROGRAMS = "/bin/"


def write(job: Job, manifest: Manifest, output: Path, *, limit: int) -> Manifest:
    work = job.folder / "archives"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    sizes = Counter[str]()
    for tree in manifest.trees:
        sizes[tree.archive] += tree.size
    names = sorted(sizes, key=lambda name: sizes[name])  # a torch, which bundles share, lies in the last files
    lots = [lot for name in names for lot in _lots(job, manifest, name)]
    stop = Event()
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        try:
            archives = tuple(pool.map(lambda lot: _compress(job, lot, work, stop), lots))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    with room(output.parent, kept="name another place:  --output PATH"):
        manifest = bundle_files.write(output, replace(manifest, archives=archives), work, limit=limit)
    shutil.rmtree(work)
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lot:
    """What goes into one archive: (path, tree), in the order in which the compressor sees most that is alike."""

    name: str
    part_of: str
    trees: tuple[str, ...]
    members: tuple[tuple[str, str], ...]


def _lots(job: Job, manifest: Manifest, name: str) -> list[_Lot]:
    """Files of the same path in several trees lie side by side. A large file is an archive of its own, so that several
    cores pack and unpack a torch."""
    trees = tuple(sorted(tree.name for tree in manifest.trees if tree.archive == name))
    members = sorted((place, tree) for tree in trees for place in job.trees[tree].content)
    large = [(place, tree) for place, tree in members if len(job.trees[tree].content[place]) >= LARGE]
    rest = tuple(member for member in members if member not in large)
    own = [
        _Lot(name=f"{name}-{number}", part_of=name, trees=trees, members=(member,))
        for number, member in enumerate(large, 1)
    ]
    return [_Lot(name=name, part_of="", trees=trees, members=rest), *own]


class _Content(io.BytesIO):
    """A file that is read for an archive: no further once `stop` is set, so that Ctrl-C does not wait for a torch."""

    def __init__(self, content: bytes, stop: Event) -> None:
        super().__init__(content)
        self.stop = stop

    def read(self, size: int | None = -1, /) -> bytes:
        if self.stop.is_set():
            raise CancelledError
        return super().read(size)


def _compress(job: Job, lot: _Lot, work: Path, stop: Event) -> Archive:
    """What took long is kept beside the wheels: a torch need not be compressed again for another bundle."""
    chain = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": XZ_PRESET, "dict_size": XZ_WINDOW}]
    key = hashlib.sha256(f"{lot} {chain}".encode()).hexdigest()[:10]
    path, kept = work / f"{lot.name}.tar.xz", job.folder / "compressed" / f"{lot.name}-{key}.tar.xz"
    if kept.exists():
        path.hardlink_to(kept)
    else:
        size = sum(len(job.trees[tree].content[place]) for place, tree in lot.members)
        job.progress(f"compressing {lot.name} ({size / 2**20:.0f} MiB)")
        with lzma.open(path, "wb", filters=chain) as target, tarfile.open(fileobj=target, mode="w") as archive:
            for place, tree in lot.members:
                content = job.trees[tree].content[place]
                mode = 0o755 if PROGRAMS in place else 0o644
                header = bundle_files.plain_member(f"{tree}/{place}", size=len(content), mode=mode)
                archive.addfile(header, _Content(content, stop))
        if size >= KEEP:
            kept.parent.mkdir(exist_ok=True)
            kept.hardlink_to(path)
    return Archive(name=lot.name, sha256=plain_files.sha256(path), size=path.stat().st_size, part_of=lot.part_of)
