"""`eaglecheck engines pack`: one small file with what SGLang releases need beside the torch of a machine.

Needs a package index (through pip) and nvcc. The releases' own metadata says what they want;
`harness.machines.slimming` says what of it travels. This module must not install anything, nor import torch or sglang.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from packaging.utils import parse_wheel_filename

from harness.contract import plain_files
from harness.engines import closure
from harness.engines.closure import EnvError, Progress
from harness.machines import bundle, fit, imports, prebuild, slimming, wheels
from harness.machines.bundle import Archive, Manifest, Release, Tree
from harness.machines.slimming import CONTROL, CONTROL_TESTS, FLASHINFER, FROM, PINNED, Rule
from harness.machines.wheels import Files

#: A bundle and what it is made from: 1.5 GB of wheels for four releases, most of it sglang-kernel; a torch is 0.8 GB.
NEED_GB = 4.0
#: The window is wide enough to see that kernels of neighbouring releases, and of neighbouring shapes, are alike.
XZ_PRESET = 6
XZ_WINDOW = 1 << 27
#: Archives of so many bytes, unpacked, are kept once they are compressed: half a minute or more.
KEEP = 1 << 27
LARGE = 1 << 26
WORKERS = os.cpu_count() or 1
#: What lies in such a folder of a wheel is started.
PROGRAMS = "/bin/"
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
    with_torch: bool
    cards: int
    include: frozenset[str]  # parts that are packed with the releases
    bases: dict[str, str] = field(default_factory=dict)  # what is carried → tree
    trees: dict[str, Files] = field(default_factory=dict)  # by full name
    archives: dict[str, str] = field(default_factory=dict)  # tree → archive
    machine: dict[str, tuple[str, ...]] = field(default_factory=dict)  # tree → folders of the machine in it
    stubs: dict[str, tuple[str, ...]] = field(default_factory=dict)  # tree → packages that it stands for
    glibc: int = 0

    @property
    def wheelhouse(self) -> Path:
        return self.folder / "wheels" / f"cp{self.python.replace('.', '')}"

    def fetch(self, wanted: dict[str, str]) -> dict[str, Path]:
        found = wheels.fetch(wanted, python=self.python, folder=self.wheelhouse, lock=self.lock, progress=self.progress)
        self.glibc = max([self.glibc, *(wheels.glibc(path) for path in found.values())])
        return found

    def rules(self, wheel: str) -> list[Rule]:
        return [rule for rule in slimming.RULES.get(wheel, ()) if rule.part not in self.include]

    def add(self, stem: str, files: Files, *, archive: str) -> str:
        name = bundle.tree_name(stem, list(files.content.items()))
        self.trees[name] = files
        self.archives[name] = archive
        return name

    def add_wheels(self, stem: str, paths: Iterable[Path], *, archive: str) -> str:
        files = Files()
        for path in paths:
            name = parse_wheel_filename(path.name)[0]
            wheels.add_wheel(files, path, self.rules(name))
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
    include: Sequence[str] = (),
    with_torch: bool = False,
    cards: int = 1,
    limit: int = 0,
) -> Manifest:
    """Write the bundle of these releases for a machine with that torch (2.11.0+cu130) and Python (3.12).

    part: write what the releases' own bundle does without (one of `slimming.PARTS`), to be unpacked after it; include:
    such parts that go into the releases' own bundle. with_torch: a release that pins another torch gets it from there;
    with its NCCL if it is for several cards. limit: bytes that no file may exceed, for several files; 0 for one.
    EnvError where a release wants another torch, asks for something unknown, or cannot be fetched or compiled.
    """
    folder = closure.home() / "pack"
    with closure.installing("pack", progress) as lock:
        job = _Job(
            torch=torch,
            python=python,
            folder=folder,
            lock=lock,
            progress=progress,
            with_control=with_control,
            with_torch=with_torch,
            cards=cards,
            include=frozenset(include),
        )
        closure.check_room(NEED_GB, what="to pack")
        sources = _sglang_wheels(job, versions)
        control = [_control(job)]
        releases = tuple(_release(job, version, sources[version], control) for version in versions)
        manifest = _manifest(job, releases, control)
        if part:
            manifest = _only_part(job, manifest, part)
        manifest = _write(job, manifest, output, limit=limit)
    return manifest


def _sglang_wheels(job: _Job, versions: Sequence[str]) -> dict[str, Path]:
    """Each release's own wheel, first of all: its metadata may say that it cannot be packed for this torch."""
    found = {version: job.fetch({"sglang": version})["sglang"] for version in versions}
    for version, path in found.items():
        wanted = wheels.requirements(path, python=job.python)
        slimming.check_requirements(version, wanted, torch=job.torch, with_torch=job.with_torch)
        slimming.own_torch(version, wanted, torch=job.torch)
    return found


def _base(job: _Job, carried: dict[str, str]) -> str:
    """The dependencies that releases share, at one version each, with flashinfer's kernels compiled; made once."""
    if (key := str(sorted(carried.items()))) not in job.bases:
        found = job.fetch(carried)
        files = Files()
        for name, path in found.items():
            wheels.add_wheel(files, path, job.rules(name))
        files.content |= _flashinfer_kernels(job, found) if FLASHINFER in carried else {}
        job.bases[key] = job.add("base", files, archive="base")
    return job.bases[key]


def _torch(job: _Job, version: str) -> tuple[list[str], str]:
    """The trees of a torch that travels, and its build; EnvError where it is of another CUDA than the machine's."""
    beside = slimming.TORCHES[version]
    wanted = {name: beside[name] for name in ("torchvision", *(("nvidia-nccl-cu13",) if job.cards > 1 else ()))}
    found = job.fetch({"torch": version, **wanted, "triton": beside["triton"]})
    build = fit.build_of(wheels.text_of(found["torch"], "torch/version.py"))
    if build.partition("+")[2] != job.torch.partition("+")[2]:
        raise EnvError(
            f"torch {version} is published as {build}, and takes NVIDIA's libraries from beside torch {job.torch}",
            next_step="name a torch of the same CUDA:  --torch VERSION+" + build.partition("+")[2],
        )
    job.progress(f"torch {build}: slimming")
    torch = job.add_wheels(f"torch-{version}", [found[name] for name in ("torch", *wanted)], archive="torch")
    job.machine[torch] = tuple(slimming.MACHINE)
    return [torch, job.add_wheels(f"triton-{beside['triton']}", [found["triton"]], archive="triton")], build


def _flashinfer(job: _Job, pins: dict[str, str], sglang: Path) -> str:
    """The tree of flashinfer for a release with its own torch: what draws tokens, not what attends.

    EnvError where the release imports more of it wherever it runs.
    """
    found = job.fetch(pins | {"nvidia-curand": CUDA_HEADERS["nvidia-curand"][1]})
    files = Files()
    wheels.add_wheel(files, found[FLASHINFER], slimming.FLASHINFER_RULES)
    wheels.add_wheel(files, found["nvidia-curand"], [Rule(pattern="*", reason="all but headers")])
    files.content |= _curand_headers(found["nvidia-curand"])
    files.content |= _flashinfer_kernels(job, found) | slimming.FLASHINFER_FILES
    if lacking := imports.lacking(sglang, "flashinfer", files.content):
        raise EnvError(
            f"{sglang.name} imports names on every card that its bundle would lack: {', '.join(lacking)}",
            next_step="find out what calls them, and add them to flashinfer's files in harness/machines/slimming.toml",
        )
    tree = job.add(f"flashinfer-{pins[FLASHINFER]}", files, archive="flashinfer")
    job.stubs[tree] = ("flashinfer",)
    return tree


def _curand_headers(path: Path) -> dict[str, bytes]:
    """Beside flashinfer's own, which reach for them when SGLang compiles its walk of a tree by uniforms."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if fnmatch(name, "nvidia/*/include/*.h")]
        return {f"flashinfer/data/include/{Path(name).name}": wheel.read(name) for name in names}


def _flashinfer_kernels(job: _Job, found: dict[str, Path]) -> dict[str, bytes]:
    """By path. Compiled once for each pair of wheels, then kept beside them."""
    pins = [str(parse_wheel_filename(found[name].name)[1]) for name in (FLASHINFER, "apache-tvm-ffi")]
    stem = "-".join([*pins, slimming.CUDA_ARCH])
    kept = job.folder / f"flashinfer-{stem}"
    if not kept.is_dir():
        work = job.folder / f"building-flashinfer-{stem}"
        shutil.rmtree(work, ignore_errors=True)
        for name, sub in ((FLASHINFER, "flashinfer/data/*"), ("apache-tvm-ffi", "tvm_ffi/*")):
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
    aot = "flashinfer/data/aot"
    return {f"{aot}/{path.relative_to(kept)}": path.read_bytes() for path in sorted(kept.rglob("*.so"))}


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


def _release(job: _Job, version: str, sglang: Path, control: Sequence[str]) -> Release:
    """One release's trees in import order: stubs, its own, what it pins, its torch, then what others share."""
    wanted = wheels.requirements(sglang, python=job.python)
    job.progress(f"SGLang {version}: slimming")
    own = [_stub(job, stub, files) for stub, files in slimming.stubs(version).items()]
    own.append(job.add_wheels(f"sglang-{version}", [sglang], archive="sglang"))
    own_pins = {name: slimming.pinned(wanted[name]) for name in PINNED}
    own_pins |= {
        name: slimming.pinned(wanted[name]) for name, (first, _) in FROM.items() if slimming.is_from(version, first)
    }
    for name, path in job.fetch(own_pins).items():
        archive = {"sglang-kernel": "kernels", "transformers": "transformers"}.get(name, "base")
        own.append(job.add_wheels(f"{name}-{own_pins[name]}", [path], archive=archive))
    torch = slimming.own_torch(version, wanted, torch=job.torch)
    carried, build = _torch(job, torch) if torch else ([], "")
    base = _base(job, slimming.carried(wanted, own_torch=bool(torch)))
    pins = slimming.flashinfer(version, wanted, asked="flashinfer" in job.include) if torch else {}
    carried += [_flashinfer(job, pins, sglang)] if pins else []
    return Release(
        version=version,
        trees=(*own, *carried, base, *control),
        environ=slimming.environ(version, own_torch=bool(torch), flashinfer=bool(pins)),
        differences=slimming.differences(version, wanted, own_torch=bool(torch), flashinfer=bool(pins)),
        torch=build,
        programs=slimming.programs(own_torch=bool(torch)),
    )


def _stub(job: _Job, name: str, files: dict[str, str]) -> str:
    tree = job.add(name, Files(content={place: text.encode() for place, text in files.items()}), archive="base")
    job.stubs[tree] = tuple(dict.fromkeys(place.partition("/")[0] for place in files))
    return tree


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
            machine=job.machine.get(name, ()),
            stands_for=job.stubs.get(name, ()),
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
        if version is None or tree.archive == part:  # flashinfer beside a torch of its own has no use for sources
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
    if not trees:
        raise EnvError(
            f"none of these releases takes {part} from {wheel} into its bundle afterwards",
            next_step=f"pack it with them:  --with {part}",
        )
    return replace(manifest, releases=(), control=(), expects=(), trees=tuple(trees.values()))


def _write(job: _Job, manifest: Manifest, output: Path, *, limit: int) -> Manifest:
    work = job.folder / "archives"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    sizes = Counter[str]()
    for tree in manifest.trees:
        sizes[tree.archive] += tree.size
    names = sorted(sizes, key=lambda name: sizes[name])  # a torch, which bundles share, lies in the last files
    lots = [lot for name in names for lot in _lots(job, manifest, name)]
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        archives = tuple(pool.map(lambda lot: _compress(job, lot, work), lots))
    manifest = bundle.write(output, replace(manifest, archives=archives), work, limit=limit)
    shutil.rmtree(work)
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lot:
    """What goes into one archive: (path, tree), in the order in which the compressor sees most that is alike."""

    name: str
    part_of: str
    trees: tuple[str, ...]
    members: tuple[tuple[str, str], ...]


def _lots(job: _Job, manifest: Manifest, name: str) -> list[_Lot]:
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


def _compress(job: _Job, lot: _Lot, work: Path) -> Archive:
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
                header = bundle.plain_member(f"{tree}/{place}", size=len(content), mode=mode)
                archive.addfile(header, io.BytesIO(content))
        if size >= KEEP:
            kept.parent.mkdir(exist_ok=True)
            kept.hardlink_to(path)
    return Archive(name=lot.name, sha256=plain_files.sha256(path), size=path.stat().st_size, part_of=lot.part_of)
