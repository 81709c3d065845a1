"""What this machine has of what eaglecheck needs, as plain data: one finding a question, each with what mends it.

This module must not change anything, must not render anything and must not import torch or sglang.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import os
import platform
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from harness.contract.words import counted
from harness.engines import closure, envs, scratch
from harness.engines.releases import drivable
from harness.machines import doctor_gpu
from harness.machines.diagnosis import Finding, Status

__all__ = ["Finding", "changed_files", "diagnose"]

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
GLIBC = "2.34"  # SGLang's compiled wheels, 0.5.11 and later
PYTHON = (3, 11)
MEMORY_GB = 4  # one CPU engine is three processes of about 0.6 GB each, beside the reference and the report
SPARE_GB = 1  # runs and checkpoints, once everything is installed
#: Folders named in one line.
SHOWN = 3
SHM_MB = 64  # what SGLang's processes share; some containers give less


def diagnose() -> list[Finding]:
    """Every question, in the order in which an answer of `missing` would hurt."""
    single: tuple[Callable[[], Finding], ...] = (
        _python,
        _platform,
        _packages,
        _resources,
        _shared_memory,
        _disk,
    )
    return [ask() for ask in single] + _left_behind() + list(_graphics()) + list(_closures()) + list(_engines())


def first_run_installs(found: Sequence[Finding]) -> bool:
    """Whether all that is missing is what `eaglecheck run` installs by itself before it starts."""
    missing = [finding for finding in found if finding.status == "missing"]
    return all(finding.detail == "not installed" and finding.mend == _install(envs.NEWEST) for finding in missing)


def _python() -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= PYTHON:
        return Finding(name="python", status="ok", detail=detail)
    return Finding(name="python", status="missing", detail=f"{detail}; 3.11 or newer is needed", mend="make setup")


def _platform() -> Finding:
    library, version = platform.libc_ver()
    detail = f"{platform.system()} {platform.machine()}, {library or 'unknown C library'} {version}".rstrip()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return Finding(name="platform", status="warn", detail=f"{detail}; tried on Linux x86_64 only")
    if library != "glibc" or Version(version) < Version(GLIBC):
        return Finding(
            name="platform", status="missing", detail=f"{detail}; SGLang's wheels need glibc {GLIBC} or newer"
        )
    return Finding(name="platform", status="ok", detail=detail)


def _packages() -> Finding:
    wanted = [Requirement(line) for line in _wanted()]
    if not wanted:
        return Finding(
            name="control packages",
            status="warn",
            detail="eaglecheck itself is not installed here, so its list of packages is unknown",
            mend="make setup",
        )
    here = {r.name: _installed(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})}
    absent = sorted(name for name, version in here.items() if not version)
    if absent:
        return Finding(
            name="control packages", status="missing", detail=f"not installed: {', '.join(absent)}", mend="make setup"
        )
    return Finding(
        name="control packages", status="ok", detail=f"all {len(here)}, torch {here.get('torch', 'unknown')}"
    )


def _wanted() -> list[str]:
    """What eaglecheck asks for: its own metadata, or the checkout's where it runs without being installed."""
    try:
        return metadata.requires("eaglecheck") or []
    except metadata.PackageNotFoundError:
        pass
    try:
        project = tomllib.loads(PROJECT.read_text())
    except OSError:
        return []
    return list(project["project"]["dependencies"])


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _resources() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory().total / 1e9
    detail = f"{cores} cores, {memory:.0f} GB of memory"
    if memory < MEMORY_GB:
        return Finding(
            name="machine",
            status="warn",
            detail=f"{detail}; an engine beside the reference wants {MEMORY_GB} GB",
            mend=".venv/bin/pytest -n 1",
        )
    return Finding(name="machine", status="ok", detail=detail)


def _shared_memory() -> Finding:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding(name="shared memory", status="warn", detail=f"no {place}; engines may not start")
    size = shutil.disk_usage(place).total / 1e6
    if size >= SHM_MB:
        return Finding(name="shared memory", status="ok", detail=f"{place}, {size:.0f} MB")
    return Finding(
        name="shared memory",
        status="warn",
        detail=f"{place} is {size:.0f} MB; engines may not start below {SHM_MB} MB",
        mend=f"mount -o remount,size=1g {place}",
    )


def _left_behind() -> list[Finding]:
    """Temporary folders of engines whose eaglecheck was killed; nothing where there are none."""
    found = scratch.left_behind()
    if not found:
        return []
    names = ", ".join(map(str, found[:SHOWN])) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    detail = f"{counted(len(found), 'folder')} of an eaglecheck that was killed: {names}"
    mend = "eaglecheck run  (the next engine's start removes them)"
    return [Finding(name="left behind", status="warn", detail=detail, mend=mend)]


def _disk() -> Finding:
    place = envs.home()
    above = next(path for path in (place, *place.parents) if path.exists())
    if why := _unfit(above):
        detail = f"EAGLECHECK_HOME is {place}, and {why}"
        return Finding(name="disk", status="missing", detail=detail, mend="export EAGLECHECK_HOME=/path/with/space")
    free = closure.free_gb(place)
    need = SPARE_GB if envs.current() or closure.is_ready(closure.location()) else closure.CLOSURE_GB
    detail = f"{free:.1f} GB free at {place}"
    if free >= need:
        return Finding(name="disk", status="ok", detail=detail)
    return Finding(
        name="disk",
        status="missing",
        detail=f"{detail}, {need} GB needed",
        mend="export EAGLECHECK_HOME=/path/with/space",
    )


def _unfit(folder: Path) -> str:
    """Why nothing can be made in there, found out by doing it: root may write everywhere, and /proc takes nothing."""
    if not folder.is_dir():
        return f"{folder} is no folder"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError:
        return f"{folder} cannot be written to"


def _graphics() -> Iterator[Finding]:
    yield from doctor_gpu.graphics(_gpus_by_nvml() or _gpus_by_driver())
    yield _compiler()


def _gpus_by_nvml() -> list[str]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _gpus_by_driver(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    lines = (line for path in sorted(root.glob("*/information")) for line in path.read_text().splitlines())
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        return Finding(name="C compiler", status="ok", detail=found)
    if _gpus_by_nvml() or _gpus_by_driver():
        return Finding(name="C compiler", status="warn", detail="none, and Triton compiles its launchers on a GPU")
    return Finding(name="C compiler", status="ok", detail="none; not needed on a CPU")


def _closures() -> Iterator[Finding]:
    """The shared environment of the installed releases, and those of older checkouts that only take room."""
    folder = closure.location()
    if closure.is_ready(folder):
        torch = (closure.read_marker(folder) or {}).get("torch", "unknown")
        yield Finding(name="engine dependencies", status="ok", detail=f"torch {torch} in {folder}")
    elif envs.current() is None and not any(engine.ready and engine.unpacked for engine in envs.list_installed()):
        detail = f"unfinished: {folder}" if folder.exists() else "not installed"
        yield Finding(name="engine dependencies", status="missing", detail=detail, mend=_install(envs.NEWEST))
    for old in closure.leftovers():
        yield Finding(
            name="engine dependencies",
            status="warn",
            detail=f"{old.name} is of another version of this project, or another Python",
            mend=f"rm -r {shlex.quote(str(old))}",
        )


def _engines() -> Iterator[Finding]:
    """The SGLang beside us, every installed release, and the newest if there is none at all."""
    here = envs.current()
    if here is not None:
        yield Finding(name=f"SGLang {here.version}", status="ok", detail=f"in this environment, torch {here.torch}")
    installed = envs.list_installed()
    yield from (_engine(engine) for engine in installed)
    yield from doctor_gpu.abilities([engine for engine in installed if engine.ready and engine.unpacked])
    if here is None and not installed:
        yield Finding(
            name=f"SGLang {envs.NEWEST}", status="missing", detail="not installed", mend=_install(envs.NEWEST)
        )


def _engine(engine: envs.EngineEnv) -> Finding:
    if engine.unpacked:
        return _unpacked(engine)
    name, site = f"SGLang {engine.version}", engine.pythonpath[0]
    remove = f"rm -r {shlex.quote(str(site.parent))}"
    standing = envs.standing(engine.version)
    if not drivable(engine.version):
        return Finding(name=name, status="warn", detail=f"{site.parent} is no release that can be driven", mend=remove)
    if not engine.ready:  # a release of our tests is needed for a run; any other is somebody's own wish
        status: Status = "warn" if standing else "missing"
        return Finding(name=name, status=status, detail=engine.why, mend=_install(engine.version))
    changed = changed_files(site)
    if changed:
        return _damaged(name, changed, mend=f"{remove} && {_install(engine.version)}")
    said = f"; {standing}" if standing else ""
    return Finding(name=name, status="ok", detail=f"as published, in {site.parent}{said}")


def _unpacked(engine: envs.EngineEnv) -> Finding:
    """A release out of a bundle: what it was slimmed by is no damage, everything else must be as published."""
    name = f"SGLang {engine.version}"
    again = "python3 -m harness.machines.unpack FILE  # its bundle"
    if not engine.ready:
        return Finding(name=name, status="missing", detail=engine.why, mend=again)
    site = next((path for path in engine.pythonpath if list(path.glob("sglang-*.dist-info"))), engine.pythonpath[0])
    changed = changed_files(site, left_out=engine.left_out)
    if changed:
        return _damaged(name, changed, mend=f"rm -r {shlex.quote(str(site))} && {again}")
    return Finding(name=name, status="ok", detail=f"as published, out of a bundle, for torch {engine.torch}")


def _damaged(name: str, changed: Sequence[str], *, mend: str) -> Finding:
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return Finding(name=name, status="missing", detail=f"damaged: not as published: {changed[0]}{more}", mend=mend)


def changed_files(site: Path, *, left_out: Sequence[str] = ()) -> tuple[str, ...]:
    """Files of SGLang's wheel that are gone or differ from the hashes it was published with.

    left_out: patterns of files that a bundle does without.
    """
    record = next(iter(site.glob("sglang-*.dist-info/RECORD")), None)
    if record is None:
        return ("RECORD",)
    with record.open(newline="") as rows:
        published = [(row[0], row[1]) for row in csv.reader(rows) if len(row) > 1 and row[1].startswith("sha256=")]
    own = (
        (name, digest)
        for name, digest in published
        if name.startswith("sglang/") and not any(fnmatch(name, pattern) for pattern in left_out)
    )
    return tuple(name for name, digest in own if _sha256(site / name) != digest)


def _sha256(path: Path) -> str:
    if not path.is_file():
        return ""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _install(version: str) -> str:
    return f"eaglecheck engines install {version}"
