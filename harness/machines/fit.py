"""Whether a bundle fits a machine: its Python, torch, C library, cards and the packages beside torch.

Standard library only, since it is asked before anything is unpacked. It must not import torch, which would take memory
on the card it asks about: it reads files, and asks nvidia-smi.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.both_sides import gpus
from harness.engines import dependencies
from harness.engines.dependencies import Progress
from harness.machines.bundle import BundleError, Manifest

#: Where CUDA's own packages put it.
TOOLKIT = Path("/usr/local/cuda")
#: What nvidia-smi is asked of a card, and how long it may take.
CARD_FIELDS = ("name", "uuid", "memory.total", "memory.free", "compute_cap", "driver_version")
SMI_SECONDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card; memory in MiB, compute capability as '9.0'."""

    name: str
    uuid: str
    memory: int
    free: int
    capability: str
    driver: str


def cards() -> tuple[Card, ...]:
    """Every card; empty without a driver, or with one that does not answer."""
    try:
        return ask_cards()
    except gpus.SmiError:
        return ()


def ask_cards() -> tuple[Card, ...]:
    """Every card; empty where there is no nvidia-smi. SmiError where it fails or says something unexpected."""
    try:
        return tuple(map(_card, gpus.query("gpu", CARD_FIELDS, seconds=SMI_SECONDS)))
    except gpus.NoSmi:
        return ()


def _card(one: dict[str, str]) -> Card:
    try:
        return Card(
            name=one["name"],
            uuid=one["uuid"],
            memory=int(one["memory.total"]),
            free=int(one["memory.free"]),
            capability=one["compute_cap"],
            driver=one["driver_version"],
        )
    except ValueError as error:
        raise gpus.SmiError(f"nvidia-smi answered {', '.join(one.values())!r}") from error


def check_machine(manifest: Manifest, progress: Progress) -> None:
    """BundleError if this Python, its torch, the C library, the card or the packages beside torch do not fit."""
    if dependencies.python_tag() != manifest.python:
        raise BundleError(
            f"the bundle is for Python {manifest.python}, this is {dependencies.python_tag()} at {sys.executable}",
            next_step=f"start it with that Python, or {manifest.again(f'--python {dependencies.python_tag()}')}",
        )
    found = torch_version()
    if found != manifest.torch:
        have = f"torch {found}" if found else f"no torch in {sys.executable}"
        raise BundleError(
            f"the bundle is for torch {manifest.torch}, here is {have}",
            next_step=f"start it with the Python that has it, or {manifest.again('--torch ' + (found or 'VERSION'))}",
        )
    library, version = platform.libc_ver()
    if library != "glibc" or _numbers(version) < _numbers(manifest.glibc):
        raise BundleError(
            f"the bundle needs glibc {manifest.glibc} or newer, here is {library or 'none'} {version}",
            next_step="unpack it on a newer Linux distribution, or in a container of one",
        )
    _check_own_torch(manifest)
    missing = [problem for name in manifest.expects if (problem := _lacking(name))]
    if missing:
        raise BundleError(
            f"the bundle relies on packages that {sys.executable} lacks: {', '.join(missing)}",
            next_step="install them beside torch; they come with its usual images",
        )
    _check_card(manifest, progress)


def _check_own_torch(manifest: Manifest) -> None:
    """A torch out of the bundle uses libraries and headers beside the machine's own, and programs of its toolkit."""
    folders = {name for tree in manifest.trees for name in tree.machine}
    absent = sorted(name for name in folders if not (beside_torch() / name).is_dir())
    if absent:
        raise BundleError(
            f"the bundle's torch takes what it needs from {', '.join(absent)} beside the machine's own torch, and they "
            f"are not in {beside_torch()}",
            next_step="start it with a Python whose torch came as a wheel, with NVIDIA's wheels beside it",
        )
    programs = sorted({name for release in manifest.releases for name in release.programs.values()})
    if lacking := [name for name in programs if not program(name)]:
        raise BundleError(
            f"the bundle's torch needs {', '.join(lacking)}, which is not found here",
            next_step="name a CUDA 13 toolkit:  export CUDA_HOME=/usr/local/cuda",
        )


def program(name: str) -> str:
    """The path of one of CUDA's programs: the toolkit's, else the one that the machine's own triton has; or empty."""
    homes = [Path(home, "bin") for key in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(key))]
    found = [Path(path) for one in (name, "nvcc") if (path := shutil.which(one))]
    homes += [place for path in found for place in (path.parent, path.resolve().parent)]
    homes += [TOOLKIT / "bin", beside_torch() / "triton" / "backends" / "nvidia" / "bin"]
    return next((str(home / name) for home in homes if os.access(home / name, os.X_OK)), "")


def beside_torch() -> Path:
    """The folder in which this Python's torch lies; nowhere if there is none."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else Path("/nonexistent")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _check_card(manifest: Manifest, progress: Progress) -> None:
    found = cards()
    if not found:
        progress(f"no GPU is seen here; the kernels of this bundle are for {manifest.cuda_arch}")
    fitting = [card for card in found if f"sm_{card.capability.replace('.', '')}" == manifest.cuda_arch]
    if found and not fitting:
        raise BundleError(
            f"the bundle is for {manifest.cuda_arch}, the card here is {found[0].name} (sm_"
            f"{found[0].capability.replace('.', '')})",
            next_step="only Hopper cards are served so far; elsewhere:  pip install sglang",
        )


def torch_version() -> str:
    """This Python's torch with its build (2.11.0+cu130), without importing it; empty where there is none."""
    try:
        return build_of((beside_torch() / "torch" / "version.py").read_text())
    except OSError:
        return ""


def build_of(text: str) -> str:
    """What torch/version.py says it is; empty where it says nothing."""
    found = re.search(r"__version__ = '([^']+)'", text)
    return found[1] if found else ""


def _lacking(expected: str) -> str:
    """What is wrong with one expected package ('name' or 'name<2'), empty if nothing is."""
    name, _, below = expected.partition("<")
    version = dependencies.version_here(name)
    too_new = below and _numbers(version) >= _numbers(below)
    return expected if not version else f"{expected} ({version} is there)" if too_new else ""
