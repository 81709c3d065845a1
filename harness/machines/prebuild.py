"""Compiles the few flashinfer kernels that every engine calls, so that a bundle need not carry flashinfer's sources.

Plain nvcc and the C++ compiler, no GPU needed: the results use tvm-ffi's C interface, so they serve any Python.

This module must not import flashinfer or torch: only their headers are needed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.engines.dependencies import EnvError, Progress
from harness.machines import fit
from harness.machines.bundle_contents import PREBUILT

#: As flashinfer 0.6.12 compiles its own kernels at run time for this card.
FLAGS = (
    *("-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "-Xfatbin=-compress-all", "--expt-relaxed-constexpr"),
    *("-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16"),
    *("-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2"),
    *("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1"),
    *("-gencode=arch=compute_90a,code=sm_90a", "--compiler-options=-fPIC", "-static-global-template-stub=false"),
)
SECONDS = 3600  # of one file; an idle machine needs three minutes


def nvcc() -> Path | None:
    """CUDA's compiler, or None."""
    path = fit.program("nvcc")
    return Path(path) if path else None


def build(
    *, flashinfer: Path, tvm_ffi: Path, cuda_headers: Sequence[Path], work: Path, progress: Progress
) -> dict[str, bytes]:
    """The compiled modules by their path below flashinfer's `data/aot`; EnvError with the compiler's last lines.

    flashinfer: its data folder. tvm_ffi: its package folder. cuda_headers: more folders with CUDA's library headers.
    """
    compiler = nvcc()
    if compiler is None:
        raise EnvError(
            "no nvcc on this machine, and flashinfer's kernels have to be compiled",
            next_step="name a CUDA 13 toolkit:  export CUDA_HOME=/usr/local/cuda",
        )
    progress("compiling flashinfer's norm and sampling kernels for sm_90a (about 3 min on two cores, once)")
    include = _include(flashinfer, tvm_ffi, cuda_headers)
    work.mkdir(parents=True, exist_ok=True)
    jobs = [
        ([str(compiler), *FLAGS, *extra, *include, "-c", str(flashinfer / "csrc" / source)], work / f"{source}.o")
        for sources, extra in PREBUILT.values()
        for source in sources
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(lambda job: _run([*job[0], "-o", str(job[1])]), jobs))
    return {f"{name}/{name}.so": _link(compiler, name, sources, work) for name, (sources, _) in PREBUILT.items()}


def _include(flashinfer: Path, tvm_ffi: Path, cuda_headers: Sequence[Path]) -> list[str]:
    first = [flashinfer / "cccl" / part for part in ("cub", "libcudacxx/include", "thrust")]
    system = [
        tvm_ffi / "include",
        *(flashinfer / part for part in ("include", "csrc", "cutlass/include", "cutlass/tools/util/include")),
        flashinfer / "spdlog" / "include",
        *cuda_headers,
    ]
    return [*(f"-I{path}" for path in first), *(part for path in system for part in ("-isystem", str(path)))]


def _link(compiler: Path, name: str, sources: Sequence[str], work: Path) -> bytes:
    """One shared library over the shared CUDA runtime, which torch has loaded by then."""
    target = work / f"{name}.so"
    objects = [str(work / f"{source}.o") for source in sources]
    _run([str(compiler), "-shared", "-cudart", "shared", "-Xlinker", "-s", *objects, "-o", str(target)])
    return target.read_bytes()


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvError(f"{command[0]} did not run: {error}", next_step="look:  eaglecheck doctor") from error
    if done.returncode:
        tail = "\n    ".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise EnvError(
            f"{Path(command[0]).name} could not compile flashinfer's kernels; its last lines:\n    {tail}",
            next_step="name another CUDA 13 toolkit:  export CUDA_HOME=/usr/local/cuda",
        )
