"""flashinfer in a bundle: the kernels that every engine calls, compiled; and a tree of it beside a torch of its own."""

from __future__ import annotations

import shutil
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from packaging.utils import parse_wheel_filename

from harness.engines.dependencies import EnvError
from harness.machines import bundle_contents, imports, prebuild, wheels
from harness.machines.bundle_contents import FLASHINFER, Rule
from harness.machines.wheels import Files, Job

#: sglang-kernel and flashinfer reach for headers that a bare compiler package lacks; only headers are taken.
CUDA_HEADERS = {"nvidia-cublas": ("cublasLt.h", "13.1.0.3"), "nvidia-curand": ("curand.h", "10.4.0.35")}


def tree(job: Job, pins: dict[str, str], sglang: Path) -> str:
    """The tree of flashinfer for a release with its own torch: what draws tokens, not what attends.

    EnvError where the release, of this wheel, imports more of it wherever it runs.
    """
    found = job.fetch(pins | {"nvidia-curand": CUDA_HEADERS["nvidia-curand"][1]})
    files = Files(archive="flashinfer", stands_for=("flashinfer",))
    wheels.add_wheel(files, found[FLASHINFER], bundle_contents.FLASHINFER_RULES)
    wheels.add_wheel(files, found["nvidia-curand"], [Rule(pattern="*", reason="all but headers")])
    files.content |= _curand_headers(found["nvidia-curand"])
    files.content |= kernels(job, found) | bundle_contents.FLASHINFER_FILES
    if lacking := imports.lacking(sglang, "flashinfer", files.content):
        raise EnvError(
            f"{sglang.name} imports names on every card that its bundle would lack: {', '.join(lacking)}",
            next_step=f"find out what calls them, and add them to flashinfer's files in {bundle_contents.TABLE}",
        )
    return job.add(f"flashinfer-{pins[FLASHINFER]}", files)


def _curand_headers(path: Path) -> dict[str, bytes]:
    """Beside flashinfer's own, which reach for them when SGLang compiles its walk of a tree by uniforms."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if fnmatch(name, "nvidia/*/include/*.h")]
        return {f"flashinfer/data/include/{Path(name).name}": wheel.read(name) for name in names}


def kernels(job: Job, found: dict[str, Path]) -> dict[str, bytes]:
    """By path. Compiled once for each pair of wheels, then kept beside them."""
    pins = [str(parse_wheel_filename(found[name].name)[1]) for name in (FLASHINFER, "apache-tvm-ffi")]
    stem = "-".join([*pins, bundle_contents.CUDA_ARCH])
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


def _cuda_headers(job: Job, work: Path) -> list[Path]:
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
