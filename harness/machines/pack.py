"""`eaglecheck engines pack`: one small file with what SGLang releases need beside the torch of a machine.

Needs a package index (through pip) and nvcc. The releases' own metadata says what they want;
`harness.machines.slimming` says what of it travels. This module must not install anything, nor import torch or sglang.
"""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from packaging.utils import parse_wheel_filename

from harness.engines import closure
from harness.engines.closure import EnvError, Progress
from harness.machines import bundle, prebuild, slimming, wheels
from harness.machines.bundle import Archive, Manifest, Release, Tree
from harness.machines.slimming import CARRIED, CARRIED_FOR_OTHERS, CONTROL, CONTROL_TESTS, FROM, PINNED
from harness.machines.wheels import Files

#: A bundle and what it is made from: 1.5 GB of wheels for four releases, most of it sglang-kernel.
NEED_GB = 4.0
#: The window is wide enough to see that kernels of neighbouring releases, and of neighbouring shapes, are alike.
XZ_PRESET = 6
XZ_WINDOW = 1 << 27
#: sglang-kernel and flashinfer reach for headers that a bare compiler package lacks; only headers are taken.
CUDA_HEADERS = {"nvidia-cublas": ("cublasLt.h", "13.1.0.3"), "nvidia-curand": ("curand.h", "10.4.0.35")}


@dataclass(slots=True, kw_only=True)
class _Job:
    """One packing: what was asked for, and what has been gathered so far."""

    torch: str
    python: str
    folder: Path
    lock: int
    progress: Progress
    with_control: bool
    trees: dict[str, Files] = field(default_factory=dict)  # by full name
    archives: dict[str, str] = field(default_factory=dict)  # tree → archive
    glibc: int = 0

    @property
    def wheelhouse(self) -> Path:
        return self.folder / "wheels" / f"cp{self.python.replace('.', '')}"

    def fetch(self, wanted: dict[str, str]) -> dict[str, Path]:
        found = wheels.fetch(wanted, python=self.python, folder=self.wheelhouse, lock=self.lock, progress=self.progress)
        self.glibc = max([self.glibc, *(wheels.glibc(path) for path in found.values())])
        return found

    def add(self, stem: str, files: Files, *, archive: str) -> str:
        name = bundle.tree_name(stem, list(files.content.items()))
        self.trees[name] = files
        self.archives[name] = archive
        return name

    def add_wheels(self, stem: str, paths: Iterable[Path], *, archive: str) -> str:
        files = Files()
        for path in paths:
            name = parse_wheel_filename(path.name)[0]
            wheels.add_wheel(files, path, slimming.RULES.get(name, ()))
        return self.add(stem, files, archive=archive)


def pack(
    versions: Sequence[str],
    *,
    torch: str,
    python: str,
    output: Path,
    with_control: bool,
    progress: Progress,
    part: str = "",
) -> Manifest:
    """Write the bundle of these releases for a machine with that torch (2.11.0+cu130) and Python (3.12).

    part: write what the releases' own bundle does without (one of `slimming.PARTS`), to be unpacked after it.
    EnvError where a release wants another torch, asks for something unknown, or cannot be fetched or compiled.
    """
    folder = closure.home() / "pack"
    with closure.installing("pack", progress) as lock:
        job = _Job(torch=torch, python=python, folder=folder, lock=lock, progress=progress, with_control=with_control)
        _room(folder)
        sources = _sglang_wheels(job, versions)
        shared = [_base(job)]
        control = [_control(job)]
        releases = tuple(_release(job, version, sources[version], [*shared, *control]) for version in versions)
        manifest = _manifest(job, releases, control)
        if part:
            manifest = _only_part(job, manifest, part)
        manifest = _write(job, manifest, output)
    return manifest


def _room(folder: Path) -> None:
    free = closure.free_gb(folder)
    if free < NEED_GB:
        raise EnvError(
            f"not enough disk space to pack: {free:.1f} GB free at {folder}, {NEED_GB} GB needed",
            next_step="free some space, or choose another disk:  export EAGLECHECK_HOME=/path/with/space",
        )


def _sglang_wheels(job: _Job, versions: Sequence[str]) -> dict[str, Path]:
    """Each release's own wheel, first of all: its metadata may say that it cannot be packed for this torch."""
    found = {version: job.fetch({"sglang": version})["sglang"] for version in versions}
    for version, path in found.items():
        slimming.check_requirements(version, wheels.requirements(path, python=job.python), torch=job.torch)
    return found


def _base(job: _Job) -> str:
    """Every release's dependencies at one version each, with flashinfer's kernels compiled."""
    found = job.fetch({**CARRIED, **CARRIED_FOR_OTHERS})
    files = Files()
    for name, path in found.items():
        wheels.add_wheel(files, path, slimming.RULES.get(name, ()))
    for place, content in _flashinfer_kernels(job, found).items():
        files.content[f"flashinfer/data/aot/{place}"] = content
    return job.add("base", files, archive="base")


def _flashinfer_kernels(job: _Job, found: dict[str, Path]) -> dict[str, bytes]:
    """Compiled once for each pair of wheels, then kept beside them."""
    stem = f"{CARRIED['flashinfer-python']}-{CARRIED['apache-tvm-ffi']}-{slimming.CUDA_ARCH}"
    kept = job.folder / f"flashinfer-{stem}"
    if not kept.is_dir():
        work = job.folder / f"building-flashinfer-{stem}"
        shutil.rmtree(work, ignore_errors=True)
        for name, sub in (("flashinfer-python", "flashinfer/data/*"), ("apache-tvm-ffi", "tvm_ffi/*")):
            _unzip(found[name], sub, work / "source")
        built = prebuild.build(
            flashinfer=work / "source" / "flashinfer" / "data",
            tvm_ffi=work / "source" / "tvm_ffi",
            cuda_headers=_cuda_headers(job, work / "headers"),
            work=work / "objects",
            progress=job.progress,
        )
        for place, content in built.items():
            target = work / "aot" / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        (work / "aot").rename(kept)
        shutil.rmtree(work)
    return {str(path.relative_to(kept)): path.read_bytes() for path in sorted(kept.rglob("*.so"))}


def _cuda_headers(job: _Job, work: Path) -> list[Path]:
    """Folders with the headers of CUDA's libraries: the toolkit's, else out of their wheels."""
    compiler = prebuild.nvcc()
    toolkit = compiler.resolve().parents[1] / "include" if compiler else Path()
    absent = {name: version for name, (header, version) in CUDA_HEADERS.items() if not (toolkit / header).exists()}
    if not absent:
        return [toolkit]
    for path in job.fetch(absent).values():
        _unzip(path, "nvidia/*/include/*", work)
    return sorted(path for path in work.glob("nvidia/*/include") if path.is_dir())


def _unzip(path: Path, pattern: str, target: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if fnmatch(name, pattern)]
        wheel.extractall(target, members=names)


def _control(job: _Job) -> str:
    wanted = {**CONTROL, **(CONTROL_TESTS if job.with_control else {})}
    return job.add_wheels("control", job.fetch(wanted).values(), archive="base")


def _release(job: _Job, version: str, sglang: Path, shared: Sequence[str]) -> Release:
    """One release's trees in import order: stubs, its own, what it pins, then what all share."""
    wanted = wheels.requirements(sglang, python=job.python)
    job.progress(f"SGLang {version}: slimming")
    own = [
        job.add(stub, Files(content={k: text.encode() for k, text in files.items()}), archive="base")
        for stub, files in slimming.stubs(version).items()
    ]
    own.append(job.add_wheels(f"sglang-{version}", [sglang], archive="sglang"))
    own_pins = {name: slimming.pinned(wanted[name]) for name in PINNED}
    own_pins |= {
        name: slimming.pinned(wanted[name]) for name, (first, _) in FROM.items() if slimming.is_from(version, first)
    }
    for name, path in job.fetch(own_pins).items():
        archive = {"sglang-kernel": "kernels", "transformers": "transformers"}.get(name, "base")
        own.append(job.add_wheels(f"{name}-{own_pins[name]}", [path], archive=archive))
    return Release(
        version=version,
        trees=(*own, *shared),
        environ=slimming.environ(version),
        differences=slimming.differences(version, wanted),
    )


def _manifest(job: _Job, releases: tuple[Release, ...], control: Sequence[str]) -> Manifest:
    used = {name for release in releases for name in release.trees}
    trees = tuple(
        Tree(
            name=name,
            archive=job.archives[name],
            files=len(files.content),
            size=sum(map(len, files.content.values())),
            wheels=tuple(files.wheels),
            slimmed=tuple(files.slimmed),
        )
        for name, files in job.trees.items()
        if name in used
    )
    expects = slimming.ON_RUNNER + (slimming.CONTROL_ON_RUNNER if job.with_control else ())
    return Manifest(
        python=job.python,
        torch=job.torch,
        glibc=f"2.{job.glibc}",
        cuda_arch=slimming.CUDA_ARCH,
        expects=tuple(sorted(expects)),
        control=tuple(control),
        releases=releases,
        trees=trees,
        archives=(),
    )


def _only_part(job: _Job, manifest: Manifest, part: str) -> Manifest:
    """The files that a rule left out for this part, once each, and into which of the releases' trees they belong."""
    wheel, _ = slimming.PARTS[part]
    trees: dict[str, Tree] = {}
    for tree in manifest.trees:
        version = next((one.version for one in tree.wheels if one.name == wheel), None)
        if version is None:
            continue
        files = Files()
        wheels.add_wheel(files, job.fetch({wheel: version})[wheel], slimming.RULES[wheel], part=part)
        name = bundle.tree_name(part, list(files.content.items()))
        before = trees.get(name)
        trees[name] = Tree(
            name=name,
            archive=part,
            files=len(files.content),
            size=sum(map(len, files.content.values())),
            wheels=(*(before.wheels if before else ()), *files.wheels),
            into=(*(before.into if before else ()), tree.name),
        )
        job.trees[name] = files
    return replace(manifest, releases=(), control=(), expects=(), trees=tuple(trees.values()))


def _write(job: _Job, manifest: Manifest, output: Path) -> Manifest:
    work = job.folder / "archives"
    work.mkdir(parents=True, exist_ok=True)
    archives = []
    for name in dict.fromkeys(tree.archive for tree in manifest.trees):
        job.progress(f"compressing {name}")
        trees = {tree.name: job.trees[tree.name] for tree in manifest.trees if tree.archive == name}
        archives.append(_compress(name, trees, work))
    manifest = replace(manifest, archives=tuple(archives))
    bundle.write(output, manifest, work)
    shutil.rmtree(work)
    return manifest


def _compress(name: str, trees: dict[str, Files], work: Path) -> Archive:
    """Files of the same path in several trees lie side by side, where the compressor sees that they are alike."""
    path = work / f"{name}.tar.xz"
    members = sorted((place, tree) for tree, files in trees.items() for place in files.content)
    chain = [{"id": lzma.FILTER_LZMA2, "preset": XZ_PRESET, "dict_size": XZ_WINDOW}]
    with lzma.open(path, "wb", filters=chain) as target, tarfile.open(fileobj=target, mode="w") as archive:
        for place, tree in members:
            content = trees[tree].content[place]
            header = bundle.plain_member(f"{tree}/{place}", size=len(content), mode=0o644)
            archive.addfile(header, io.BytesIO(content))
    with path.open("rb") as source:
        return Archive(name=name, sha256=bundle.digest_of(source), size=path.stat().st_size)
