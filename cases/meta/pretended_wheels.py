"""A pip that downloads made-up wheels: what the tests of bundles use instead of the network."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cases.meta.pretended_library import Image, container, library
from harness.engines import dependencies

TORCH = "2.11.0+cu130"
LOWEST = "manylinux_2_34_x86_64.manylinux_2_17_x86_64"
#: What SGLang asks for, as far as these tests need: one of every kind in harness/machines/bundle_contents.toml.
REQUIRES = (
    "torch==2.11.0",
    "sglang-kernel==0.4.3",
    "transformers==5.8.1",
    "xgrammar==0.2.1",
    "flashinfer_python[cu13]==0.6.12",
    "apache-tvm-ffi==0.1.9",
    "numpy",
    "orjson",
    "outlines==0.1.11",
    "sgl-deep-gemm==0.1.2",
    'decord2; sys_platform == "linux" and platform_machine == "aarch64"',
    'pytest; extra == "test"',
)


def sglang_files(version: str) -> dict[str, bytes]:
    return {
        "sglang/__init__.py": f"__version__ = {version!r}\n".encode(),
        "sglang/srt/same.py": b"# the same in every release\n",
        "sglang/test/runners.py": b"# tests\n",
        "sglang/srt/grpc/_core.cpython-312-x86_64-linux-gnu.so": b"\x7fELF" + bytes(4000),
        "sglang/srt/layers/moe/configs/E=8.json": b"{}",
        f"sglang-{version}.data/scripts/sglang": b"#!python\n",
    }


KERNEL_FILES = {
    "sgl_kernel/__init__.py": b"",
    "sgl_kernel/sm90/common_ops.abi3.so": b"\x7fELF90",
    "sgl_kernel/sm100/common_ops.abi3.so": b"\x7fELF100",
    "sgl_kernel/flash_ops.abi3.so": b"\x7fELF" + b"flash" * 2000,
}
#: What SGLang asks for where it wants another torch than most machines have.
REQUIRES_TORCH = (
    "torch==2.14.1",
    "torchvision",
    "sglang-kernel==0.4.10",
    "transformers==5.19.0",
    "xgrammar==0.2.7",
    "flashinfer_python[cu13]==0.7.2",
    "apache-tvm-ffi==0.1.11",
    "openai>=2",
    "sgl-deep-gemm==0.2.3.post2",
    "nvidia-cutlass-dsl[cu13]==4.8.0",
)
OWN, OTHER = (Image(architecture=number, content=bytes([number]) * 3000) for number in (90, 100))
TORCH_FILES = {
    "torch/__init__.py": b"",
    "torch/version.py": b"__version__ = '2.14.1+cu130'\n",
    "torch/include/ATen/ATen.h": b"// headers",
    "torch/bin/torch_shm_manager": b"a program",
    "torch/lib/libtorch_cuda.so": library(container(OTHER, OWN), names=(("ncclNew", False),)),
}
TRITON_FILES = {
    "triton/__init__.py": b"",
    "triton/_C/libtriton.so": library(b""),
    "triton/backends/nvidia/bin/ptxas": b"a program",
}
NCCL_FILES = {"nvidia/nccl/lib/libnccl.so.2": library(container(OWN, OTHER))}
FLASHINFER_FILES = {
    "flashinfer/__init__.py": b"",
    "flashinfer/version.py": b"__version__ = 'made up'\n",
    "flashinfer/sampling.py": b"",
    "flashinfer/fused_moe/core.py": b"import cutlass\n",
    "flashinfer/data/include/flashinfer/sampling.cuh": b"// headers",
    "flashinfer/data/csrc/batch_prefill.cu": b"// kernels",
}

OTHERS = {
    "flashinfer-python": FLASHINFER_FILES,
    "torch": TORCH_FILES,
    "triton": TRITON_FILES,
    "nvidia-nccl-cu13": NCCL_FILES,
    "nvidia-curand": {"nvidia/cu13/include/curand.h": b"// headers", "nvidia/cu13/lib/libcurand.so": b"a library"},
}


@dataclass
class PretendedIndex:
    """Stands in for `dependencies.run`: answers `pip download` with wheels made on the spot."""

    asked: list[str] = field(default_factory=list)
    requires: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of SGLang, by version
    fail: Callable[[str], dependencies.Finished | None] = lambda command: None

    def __call__(self, command: Sequence[str], *, lock: int, progress: dependencies.Progress) -> dependencies.Finished:
        os.fstat(lock)
        if (ended := self.fail(" ".join(command))) is not None:
            return ended
        folder = Path(command[command.index("-d") + 1])
        for requirement in command[command.index("-d") + 2 :]:
            name, version = requirement.split("==")
            self.asked.append(requirement)
            self._make(folder, name, version)
        return dependencies.Finished(code=0)

    def _make(self, folder: Path, name: str, version: str) -> None:
        if name == "sglang":
            requires = self.requires.get(version, REQUIRES)
            wheel(folder, name, version, sglang_files(version), requires=requires, tag=f"cp312-cp312-{LOWEST}")
        elif name == "sglang-kernel":
            wheel(folder, name, version, KERNEL_FILES, tag="cp310-abi3-manylinux2014_x86_64")
        elif files := OTHERS.get(name):
            wheel(folder, name, version, files)
        else:
            wheel(folder, name, version, {f"{name.replace('-', '_')}/__init__.py": f"# {version}\n".encode()})


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    requires: Sequence[str] = (),
    tag: str = "py3-none-any",
) -> Path:
    """A wheel with metadata and hashes, as an index would serve it."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    info = f"{stem}.dist-info"
    content = {**files, f"{info}/METADATA": "\n".join([*lines, "", ""]).encode()}
    record = "".join(f"{place},{_digest(data)},{len(data)}\n" for place, data in content.items())
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for place, data in {**content, f"{info}/RECORD": record.encode()}.items():
            packed.writestr(zipfile.ZipInfo(place), data)
    return path


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
