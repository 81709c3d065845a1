"""`eaglecheck engines unpack`: makes the releases of a bundle usable on a machine without any network.

Standard library only, and started by itself where the control side's packages are still to come out of the bundle:
`python3 -m harness.machines.unpack FILES`. Each tree is unpacked beside its place and renamed into it, and a release
is declared finished last, so what was interrupted never looks finished and the next call goes on.

This module must not import torch or sglang: it looks at files.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.contract.outputs import check_target
from harness.contract.usage import UserError
from harness.engines import dependencies
from harness.engines.dependencies import EnvError, Progress
from harness.machines import bundle_files, fit, kernels
from harness.machines.bundle import Archive, BundleError, Manifest, Release, Tree
from harness.machines.bundle_files import Reader

CHECKOUT = Path(__file__).resolve().parents[2]
#: Names the folder that Python keeps bytecode in.
PREFIX = "PYTHONPYCACHEPREFIX"
#: Where kernels go that are compiled at first use: one folder for all of them, so that it can be kept and cleared.
KERNEL_CACHES = {
    "SGLANG_JIT_CACHE_DIR": "kernels/sglang-jit",  # from 0.5.18 on; tvm-ffi's own before
    "TVM_FFI_CACHE_DIR": "kernels/tvm-ffi",
    "FLASHINFER_WORKSPACE_BASE": "kernels/flashinfer",
    "TRITON_CACHE_DIR": "kernels/triton",
}


def unpack(*paths: Path, progress: Progress, warm: bool = False) -> tuple[str, ...]:
    """Install every release of the bundles in these files, given in any order; returns their versions.

    BundleError for a file that is damaged, missing or not for this machine; EnvError where there is no room, or another
    kind of installation in the way. warm: they are to be booted next, so EnvError too where there are none: bundles of
    kernels, or of parts, bring no release.
    """
    versions = tuple(version for files in bundle_files.grouped(paths) for version in _unpack(files, progress))
    if warm and not versions:
        raise EnvError(
            "--warm boots the releases of a bundle, and these files hold none; what they hold is unpacked",
            next_step="name the releases' bundle too:  python3 -m harness.machines.unpack RELEASES FILES --warm",
        )
    return versions


def _unpack(files: Sequence[Path], progress: Progress) -> tuple[str, ...]:
    with bundle_files.opened(*files) as reader:
        manifest = reader.manifest
        fit.check_machine(manifest, progress)
        reader.check_there(_needed(manifest))
        with dependencies.installing("unpack", progress), dependencies.workplace() as work:
            shutil.rmtree(parts() / ".incoming", ignore_errors=True)  # where older checkouts unpacked, under this lock
            if manifest.home:
                kernels.restore(reader, work, progress=progress)
            for release in manifest.releases:
                _check_place(release.version)
            _place_trees(reader, work, progress)
            for tree in manifest.trees:
                _add_to_others(tree, progress)
            for release in manifest.releases:
                _finish(release, manifest)
                progress(f"SGLang {release.version} is ready")
            if manifest.releases:
                _write_launchers(manifest)
    return tuple(release.version for release in manifest.releases)


def parts() -> Path:
    return dependencies.home() / "parts"


def launcher() -> Path:
    """Starts Python with the control side's packages: `launcher -m harness.cli …`."""
    return dependencies.home() / "bin" / "python"


def _check_place(version: str) -> None:
    folder = dependencies.home() / "engines" / version
    marker = dependencies.read_marker(folder)
    if marker is not None and "trees" not in marker:
        raise EnvError(
            f"SGLang {version} is installed already in {folder}, from a package index",
            next_step=f"choose another place:  export EAGLECHECK_HOME=/path, or remove it:  rm -r "
            f"{shlex.quote(str(folder))}",
        )


def _absent(manifest: Manifest) -> list[Tree]:
    """The trees that are not unpacked here yet."""
    return [tree for tree in manifest.trees if not (parts() / tree.name).is_dir()]


def _needed(manifest: Manifest) -> list[Archive]:
    """The archives of trees that are not here yet, and all of kept kernels."""
    wanted = {tree.archive for tree in _absent(manifest)}
    return [one for one in manifest.archives if manifest.home or (one.part_of or one.name) in wanted]


def _place_trees(reader: Reader, incoming: Path, progress: Progress) -> None:
    """Every tree that is not there yet; archives are independent, and xz works on one core each."""
    manifest = reader.manifest
    if manifest.home:
        return
    _check_hosts(manifest)
    absent = _absent(manifest)
    if not absent:
        progress("every part of this bundle is unpacked already")
        return
    dependencies.check_room(1.5 * sum(tree.size for tree in absent) / 1e9, what="to unpack")
    needed = _needed(manifest)
    for archive in needed:  # all hashes before anything is unpacked; the tar below is read by one thread at a time
        progress(f"checking {archive.member} ({archive.size / 2**20:.1f} MiB)")
        reader.save(archive, incoming / archive.member)
    progress(f"unpacking {len(absent)} parts ({sum(tree.size for tree in absent) / 2**20:.0f} MiB)")
    for archive in needed:
        if archive.part_of:  # tarfile of Python 3.12.3 fails where another thread makes the same folder at once
            _make_folder(incoming / archive.member, incoming)
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=len(needed)) as pool:
        try:
            list(pool.map(lambda archive: _extract(incoming / archive.member, incoming, stop), needed))
        finally:
            stop.set()  # the pool waits for all of them, after Ctrl-C too
    parts().mkdir(exist_ok=True)
    for tree in absent:
        _link_machine(tree, incoming / tree.name)
        (incoming / tree.name).rename(parts() / tree.name)
    progress("compiling Python files")
    folders = [str(parts() / tree.name) for tree in absent if not tree.into]
    # A process of its own: its workers inherit the option, so that nobody reads of others' odd string literals.
    command = [sys.executable, "-W", "ignore", "-m", "compileall", "-q", "-j", "0", *folders]
    subprocess.run(command, env=os.environ | {PREFIX: str(_bytecode())}, check=False)


def _bytecode() -> Path:
    """Where bytecode is kept, of the machine's own packages too.

    Some images install them uncompiled and let Python write none, so that each process compiles thousands of files.
    """
    return Path(os.environ.get(PREFIX) or dependencies.home() / "bytecode")


def _link_machine(tree: Tree, folder: Path) -> None:
    """The machine's own folders where the tree looks for them, unless it brings what is in there itself."""
    for name in tree.machine:
        if not (place := folder / name).exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(fit.beside_torch() / name)


def _check_hosts(manifest: Manifest) -> None:
    """A part of its own is of no use without the very trees it was packed for."""
    for tree in manifest.trees:
        if tree.into and not any((parts() / host).is_dir() for host in tree.into):
            wanted = ", ".join(host.rpartition("-")[0] for host in tree.into)
            raise BundleError(
                f"this bundle only adds to {wanted}, which is not unpacked here in the version it was packed for",
                next_step="unpack the releases' bundle first; both must come from the same checkout",
            )


def _add_to_others(tree: Tree, progress: Progress) -> None:
    """Hard links, so that a compiler and an importer see plain files, and nothing is there twice."""
    for host in tree.into:
        if not (parts() / host).is_dir():
            continue
        for source in sorted(one for one in (parts() / tree.name).rglob("*") if one.is_file()):
            target = parts() / host / source.relative_to(parts() / tree.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                os.link(source, target)
        progress(f"{tree.name.rpartition('-')[0]} is added to {host.rpartition('-')[0]}")


class _Packed(io.BufferedReader):
    """An archive that can be read until `stop` is set: nothing else ends a thread that unpacks."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path))
        self._stop = stop

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stop.is_set():
            raise InterruptedError
        return super().read(size)


def _extract(path: Path, target: Path, stop: threading.Event) -> None:
    with _Packed(path, stop) as packed, tarfile.open(fileobj=packed, mode="r:xz") as archive:
        archive.extractall(target, filter="data")


def _make_folder(path: Path, target: Path) -> None:
    """The folder of the one file in an archive, which other archives of its tree share."""
    with tarfile.open(path, "r:xz") as archive:
        first = archive.next()
    if first is not None:
        (target / first.name).parent.mkdir(parents=True, exist_ok=True)


def _finish(release: Release, manifest: Manifest) -> None:
    """Declare a release usable: from here on `harness.engines.envs` finds it."""
    folder = dependencies.home() / "engines" / release.version
    folder.mkdir(parents=True, exist_ok=True)
    environ = release.environ | {key: str(dependencies.home() / place) for key, place in KERNEL_CACHES.items()}
    environ |= {key: fit.program(name) for key, name in release.programs.items()}
    used = {tree.name: tree for tree in manifest.trees if tree.name in release.trees}
    dependencies.write_marker(
        folder,
        {
            "version": release.version,
            "python": manifest.python,
            "interpreter": sys.executable,
            "torch": release.torch or manifest.torch,
            "own_torch": bool(release.torch),
            "machine_torch": manifest.torch,
            "cuda_arch": manifest.cuda_arch,
            "trees": list(release.trees),
            "environ": environ,
            "slimmed": [rule.pattern for tree in used.values() for rule in tree.slimmed],
            "described": [text for tree in used.values() if (text := _described(tree))],
        },
    )


def _described(tree: Tree) -> str:
    """What a tree was slimmed by, in a line; empty if it is whole."""
    said = [f"stands in for {name}" for name in tree.stands_for]
    said += [f"without {rule.reason}" for rule in tree.slimmed]
    said += [f"the machine's own {name}" for name in tree.machine if (parts() / tree.name / name).is_symlink()]
    return f"{tree.name.rpartition('-')[0]}: {', '.join(dict.fromkeys(said))}" if said else ""


def _write_launchers(manifest: Manifest) -> None:
    """`bin/python` and `bin/eaglecheck`: this Python with the checkout and the control side's packages on its path."""
    path = os.pathsep.join(str(place) for place in (CHECKOUT, *(parts() / name for name in manifest.control)))
    kept = f"PYTHONDONTWRITEBYTECODE= {PREFIX}=${{{PREFIX}:-{shlex.quote(str(_bytecode()))}}}"
    start = f"{kept} PYTHONPATH={shlex.quote(path)}${{PYTHONPATH:+:$PYTHONPATH}} exec {shlex.quote(sys.executable)}"
    for name, arguments in (("python", '"$@"'), ("eaglecheck", '-m harness.cli "$@"')):
        place = launcher().with_name(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f"{name}.partial")
        partial.write_text(f"#!/bin/sh\n{start} {arguments}\n")
        partial.chmod(0o755)
        partial.replace(place)


def main(arguments: Sequence[str]) -> int:
    """`python3 -m harness.machines.unpack FILES`: exit 0, 2 for an unusable bundle, 3 for an unusable place."""
    parser = argparse.ArgumentParser(
        prog="python3 -m harness.machines.unpack", description="Install the releases of a bundle.", allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="made by `eaglecheck engines pack`")
    parser.add_argument("--warm", action="store_true", help="boot each release once, to compile its kernels")
    parser.add_argument("--keep-kernels", type=Path, metavar="FILE", help="write the compiled kernels to a bundle")
    chosen = parser.parse_args(arguments)
    try:
        check_target(chosen.keep_kernels, option="keep-kernels", piped=False)
        unpack(*chosen.files, progress=_print, warm=chosen.warm)
        if chosen.warm:  # by the command itself, which finds the packages that have just been unpacked
            command = str(launcher().with_name("eaglecheck"))
            os.execv(command, [command, "engines", "unpack", *arguments])
        if chosen.keep_kernels:
            kernels.save(chosen.keep_kernels, progress=_print)
    except UserError as error:
        print(f"eaglecheck: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("eaglecheck: interrupted; type the same command again to go on", file=sys.stderr)
        return 3
    _print(f"start it:  {shlex.quote(str(launcher().with_name('eaglecheck')))} doctor")
    return 0


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
