"""What this machine has of what eaglecheck needs, as plain data: a table of probes, each answer with what fixes it.

This module must not change anything, must not render anything and must not import torch or sglang.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from harness.contract.words import counted, some
from harness.engines import dependencies, envs, temporary_folders
from harness.engines.releases import drivable
from harness.machines import doctor_gpu
from harness.machines.doctor_gpu import Answer, missing, ok, warn

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
GLIBC = "2.34"  # SGLang's compiled wheels, 0.5.11 and later
PYTHON = (3, 11)
MEMORY_GB = 4  # one CPU engine is three processes of about 0.6 GB each, beside the reference and the report
SPARE_GB = 1  # runs and checkpoints, once everything is installed
SHOWN = 3  # folders named in one line
SHM_MB = 64  # what SGLang's processes share; some containers give less
ELSEWHERE = "export EAGLECHECK_HOME=/path/with/space"
UNPACK = "python3 -m harness.machines.unpack FILES  # its bundle"


def diagnose() -> list[Answer]:
    """Every answer, in the order in which one of `missing` would hurt."""
    return [replace(answer, name=answer.name or name) for name, probe in PROBES for answer in probe()]


def first_run_installs(found: Sequence[Answer]) -> bool:
    """Whether all that is missing is what `eaglecheck run` installs by itself before it starts."""
    absent = [answer for answer in found if answer.status == "missing"]
    return all(answer.detail == "not installed" and answer.fix == _install(envs.NEWEST) for answer in absent)


def _python() -> Iterator[Answer]:
    detail = f"{platform.python_version()} at {sys.executable}"
    yield ok(detail) if sys.version_info >= PYTHON else missing(f"{detail}; 3.11 or newer is needed", "make setup")


def _bytecode() -> Iterator[Answer]:
    """Nothing where it is kept."""
    if sys.dont_write_bytecode:
        prefix = shlex.quote(str(envs.home() / "bytecode"))
        detail = "Python writes none here, so each process may compile what it imports"
        yield warn(detail, f"unset PYTHONDONTWRITEBYTECODE; export PYTHONPYCACHEPREFIX={prefix}")


def _platform() -> Iterator[Answer]:
    library, version = platform.libc_ver()
    detail = f"{platform.system()} {platform.machine()}, {library or 'unknown C library'} {version}".rstrip()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        yield warn(f"{detail}; tried on Linux x86_64 only")
    elif library != "glibc" or Version(version) < Version(GLIBC):
        yield missing(f"{detail}; SGLang's wheels need glibc {GLIBC} or newer")
    else:
        yield ok(detail)


def _packages() -> Iterator[Answer]:
    wanted = [one for one in map(Requirement, _wanted()) if one.marker is None or one.marker.evaluate({"extra": ""})]
    here = {one.name: dependencies.version_here(one.name) for one in wanted}
    absent = sorted(name for name, version in here.items() if not version)
    if not wanted:
        yield warn("eaglecheck itself is not installed here, so its list of packages is unknown", "make setup")
    elif absent:
        yield missing(f"not installed: {', '.join(absent)}", "make setup")
    else:
        yield ok(f"all {len(here)}, torch {here.get('torch', 'unknown')}")


def _wanted() -> list[str]:
    """What eaglecheck asks for: its own metadata, or the checkout's where it runs without being installed."""
    try:
        return metadata.requires("eaglecheck") or []
    except metadata.PackageNotFoundError:
        pass
    try:
        return list(tomllib.loads(PROJECT.read_text())["project"]["dependencies"])
    except OSError:
        return []


def _resources() -> Iterator[Answer]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory().total / 1e9
    detail = f"{cores} cores, {memory:.0f} GB of memory"
    little = warn(f"{detail}; an engine beside the reference wants {MEMORY_GB} GB", ".venv/bin/pytest -n 1")
    yield ok(detail) if memory >= MEMORY_GB else little


def _shared_memory() -> Iterator[Answer]:
    place = Path("/dev/shm")
    size = shutil.disk_usage(place).total / 1e6 if place.is_dir() else 0
    if not place.is_dir():
        yield warn(f"no {place}; engines may not start")
    elif size < SHM_MB:
        detail = f"{place} is {size:.0f} MB; engines may not start below {SHM_MB} MB"
        yield warn(detail, f"mount -o remount,size=1g {place}")
    else:
        yield ok(f"{place}, {size:.0f} MB")


def _disk() -> Iterator[Answer]:
    place = envs.home()
    above = next(path for path in (place, *place.parents) if path.exists())
    if why := _unfit(above):
        yield missing(f"EAGLECHECK_HOME is {place}, and {why}", ELSEWHERE)
        return
    free = dependencies.free_gb(place)
    need = SPARE_GB if envs.current() or dependencies.is_ready(dependencies.location()) else dependencies.NEED_GB
    detail = f"{free:.1f} GB free at {place}"
    yield ok(detail) if free >= need else missing(f"{detail}, {need} GB needed", ELSEWHERE)


def _unfit(folder: Path) -> str:
    """Why nothing can be made in there, found out by doing it: root may write everywhere, and /proc takes nothing."""
    if not folder.is_dir():
        return f"{folder} is no folder"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError:
        return f"{folder} cannot be written to"


def _left_behind() -> Iterator[Answer]:
    """Temporary folders of engines whose eaglecheck was killed; nothing where there are none."""
    if found := temporary_folders.left_behind():
        names = some([str(one) for one in found], SHOWN)
        detail = f"{counted(len(found), 'folder')} of an eaglecheck that was killed: {names}"
        yield warn(detail, "eaglecheck run  (the next engine's start removes them)")


def _compiler() -> Iterator[Answer]:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        yield ok(found)
    elif doctor_gpu.by_driver():
        yield warn("none, and Triton compiles its launchers on a GPU")
    else:
        yield ok("none; not needed on a CPU")


def _dependencies() -> Iterator[Answer]:
    """The shared environment of the installed releases, and those of older checkouts that only take room."""
    folder = dependencies.location()
    if dependencies.is_ready(folder):
        torch = (dependencies.read_marker(folder) or {}).get("torch", "unknown")
        yield ok(f"torch {torch} in {folder}")
    elif envs.current() is None and not any(engine.ready and engine.unpacked for engine in envs.list_installed()):
        detail = f"unfinished: {folder}" if folder.exists() else "not installed"
        yield missing(detail, _install(envs.NEWEST))
    for old in dependencies.leftovers():
        remove = f"rm -r {shlex.quote(str(old))}"
        yield warn(f"{old.name} is of another version of this project, or another Python", remove)


def _engines() -> Iterator[Answer]:
    """The SGLang beside us, every installed release, and the newest if there is none at all."""
    here, installed = envs.current(), envs.list_installed()
    if here is not None:
        yield _here(here, f"SGLang {here.version}")
    for engine in installed:
        yield (_unpacked if engine.unpacked else _release)(engine, f"SGLang {engine.version}")
        if engine.slimmed:
            yield ok("; ".join(engine.slimmed), name=f"SGLang {engine.version} slimmed")
    yield from doctor_gpu.abilities([engine for engine in installed if engine.ready and engine.unpacked])
    if here is None and not installed:
        yield missing("not installed", _install(envs.NEWEST), name=f"SGLang {envs.NEWEST}")


def _here(engine: envs.EngineEnv, name: str) -> Answer:
    """The SGLang beside us, used as it is."""
    try:
        envs.resolve(engine.version)
    except envs.UnknownReleaseError as error:
        return missing(error.what.partition(": ")[2], error.next_step.rpartition(":  ")[2], name=name)
    said = filter(None, [f"in this environment, torch {engine.torch}", envs.standing(engine.version)])
    return ok("; ".join(said), name=name)


def _release(engine: envs.EngineEnv, name: str) -> Answer:
    site = engine.pythonpath[0]
    remove, standing = f"rm -r {shlex.quote(str(site.parent))}", envs.standing(engine.version)
    if not drivable(engine.version):
        return warn(f"{site.parent} is no release that can be driven", remove, name=name)
    if not engine.ready:  # a release of our tests is needed for a run; any other is somebody's own wish
        return (warn if standing else missing)(engine.why, _install(engine.version), name=name)
    if changed := envs.changed_files(site):
        return _damaged(changed, f"{remove} && {_install(engine.version)}", name)
    return ok(f"as published, in {site.parent}" + (f"; {standing}" if standing else ""), name=name)


def _unpacked(engine: envs.EngineEnv, name: str) -> Answer:
    """A release out of a bundle: what it was slimmed by is no damage, everything else must be as published."""
    if not engine.ready:
        return missing(engine.why, UNPACK, name=name)
    site = next((path for path in engine.pythonpath if list(path.glob("sglang-*.dist-info"))), engine.pythonpath[0])
    if changed := envs.changed_files(site, left_out=engine.left_out):
        return _damaged(changed, f"rm -r {shlex.quote(str(site))} && {UNPACK}", name)
    torch = f"with its own torch {engine.torch}" if engine.own_torch else f"for torch {engine.torch}"
    return ok(f"as published, out of a bundle, {torch}", name=name)


def _damaged(changed: Sequence[str], fix: str, name: str) -> Answer:
    return missing(f"damaged: not as published: {some(changed, 1)}", fix, name=name)


def _install(version: str) -> str:
    return f"eaglecheck engines install {version}"


#: What is asked, in order: name, and what answers. An answer may name itself.
PROBES: tuple[tuple[str, Callable[[], Iterator[Answer]]], ...] = (
    ("python", _python),
    ("bytecode", _bytecode),
    ("platform", _platform),
    ("control packages", _packages),
    ("machine", _resources),
    ("shared memory", _shared_memory),
    ("disk", _disk),
    ("left behind", _left_behind),
    ("GPU", doctor_gpu.graphics),
    ("C compiler", _compiler),
    ("engine dependencies", _dependencies),
    ("SGLang", _engines),
)
