"""Engine environments: which SGLang releases can be had here, where and how whole they are, and installing one.

A release is its wheel alone, in `engines/<version>/site`, put in front of the shared dependencies (see
`harness.engines.dependencies`); its own would name GPU builds and another torch for every release. One that came out of
a bundle (see `harness.machines.unpack`) is a marker that names its parts and the machine's own Python instead.

This module must not import sglang or torch: it is asked before every engine start and answers in milliseconds.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness.engines import dependencies
from harness.engines.dependencies import EnvError, Progress, home, version_here
from harness.engines.releases import (
    ANY_OTHER,
    NEWEST,
    SUPPORTED,
    UnknownReleaseError,
    check_drivable,
    choices,
    named,
    parsed,
    same,
    standing,
)

__all__ = [
    "ANY_OTHER",
    "NEWEST",
    "SUPPORTED",
    "EngineEnv",
    "EnvError",
    "UnknownReleaseError",
    "changed",
    "changed_files",
    "choices",
    "current",
    "ensure",
    "home",
    "list_installed",
    "resolve",
    "standing",
    "state",
]

ENGINE_GB = 0.5  # the largest wheel unpacks to 0.2 GB, and pip unpacks it beside its place first


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnv:
    """Where one SGLang release is, or would be; `why` says what is missing when it is not `ready`."""

    version: str
    python: Path
    pythonpath: tuple[Path, ...]
    torch: str
    ready: bool
    why: str = ""
    environ: tuple[tuple[str, str], ...] = ()  # settings that this release needs in its process
    left_out: tuple[str, ...] = ()  # patterns of published files that its bundle does without
    own_torch: bool = False  # its torch came out of the bundle too
    slimmed: tuple[str, ...] = ()  # what its bundle does without, in words, a line a part
    unpacked: bool = False  # out of a bundle, over the machine's own Python and, mostly, torch
    tree: Path | None = None  # a commit's Python files that run in this release's place (see harness.bisect)

    @property
    def package(self) -> Path | None:
        """The folder of its sglang package; None where it is not on disk."""
        spec = None if self.pythonpath else importlib.util.find_spec("sglang")
        here = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
        folders = (*here, *(part / "sglang" for part in self.pythonpath))
        return next((folder for folder in folders if (folder / "__init__.py").is_file()), None)


def current() -> EngineEnv | None:
    """The SGLang in this very interpreter (a GPU runner), used as it is; nothing is imported to find out."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:  # a folder that happens to be called sglang has no origin
        return None
    return EngineEnv(
        version=version_here("sglang") or "unknown",
        python=Path(sys.executable),
        pythonpath=(),
        torch=version_here("torch") or "unknown",
        ready=True,
    )


def ensure(version: str, progress: Progress) -> EngineEnv:
    """A ready environment for `version`, any published release that can be driven, installed first where needed.

    UnknownReleaseError for a release we cannot run here, EnvError when installing fails. Both say what to type next.
    """
    here = current()
    if here is not None and same(here.version, version):
        return here
    version = named(version)
    found = state(version)
    if found.ready:
        return found
    dependencies.ensure(progress)
    with dependencies.installing(f"engine-{version}", progress) as lock:
        if not state(version).ready:
            _install(version, lock=lock, progress=progress)
    found = state(version)
    if not found.ready:
        raise EnvError(f"SGLang {version} was installed, but {found.why}", next_step="look:  eaglecheck doctor")
    return found


def resolve(version: str | None) -> str:
    """The release meant, as it is written here; None: the SGLang in this interpreter, else the newest.

    UnknownReleaseError for one that `ensure` would refuse, before anything is installed.
    """
    here = current()
    if here is not None and (version is None or same(here.version, version)):
        check_drivable(here.version)
        return here.version
    return NEWEST if version is None else named(version)


def state(version: str) -> EngineEnv:
    """What is there of `version`, without installing anything."""
    folder = _folder(version)
    shared = dependencies.location()
    marker = dependencies.read_marker(folder)
    if marker is not None and "trees" in marker:
        return _unpacked(version, marker)
    why = _missing(folder, marker) or ("" if dependencies.is_ready(shared) else "its shared environment is not built")
    return EngineEnv(
        version=version,
        python=dependencies.interpreter(shared),
        pythonpath=(folder / "site",),
        torch=str((dependencies.read_marker(shared) or {}).get("torch", "unknown")),
        ready=not why,
        why=why,
    )


def _unpacked(version: str, marker: dict[str, Any]) -> EngineEnv:
    """A release out of a bundle: the machine's own Python, its torch or one of the parts, and these in import order."""
    trees = tuple(home() / "parts" / name for name in marker["trees"])
    gone = next((path.name for path in trees if not path.is_dir()), "")
    python = Path(marker["interpreter"])
    if not python.exists():
        why = f"the Python it was unpacked for is gone: {python}"
    elif marker.get("python") != dependencies.python_tag():
        why = f"it was unpacked for Python {marker.get('python')}, this is {dependencies.python_tag()}"
    else:
        why = f"damaged: its part {gone} is missing" if gone else ""
    return EngineEnv(
        version=version,
        python=python,
        pythonpath=trees,
        torch=str(marker["torch"]),
        ready=not why,
        why=f"{why}; unpack the bundle again" if why else "",
        environ=tuple(sorted(marker["environ"].items())),
        left_out=tuple(marker["slimmed"]),
        own_torch=bool(marker.get("own_torch")),
        slimmed=tuple(marker.get("described", ())),
        unpacked=True,
    )


def _missing(folder: Path, marker: dict[str, Any] | None) -> str:
    if not folder.is_dir():
        return "not installed"
    if marker is None:
        return "an installation was interrupted"
    if marker.get("python") != dependencies.python_tag():
        return f"it was installed for Python {marker.get('python')}, this is {dependencies.python_tag()}"
    if marker.get("closure") != dependencies.key():
        return "it was installed for another list of dependencies"
    return "" if (folder / "site" / "sglang" / "__init__.py").is_file() else "damaged: its sglang package is missing"


def list_installed() -> tuple[EngineEnv, ...]:
    """Every release with a folder, oldest first, finished or not."""
    folders = (path.name for path in (home() / "engines").glob("*") if path.is_dir())
    return tuple(state(name) for name in sorted(folders, key=lambda name: parsed(name) or Version("0")))


def _folder(version: str) -> Path:
    return home() / "engines" / version


def _install(version: str, *, lock: int, progress: Progress) -> None:
    folder = _folder(version)
    dependencies.start_afresh(folder, need_gb=ENGINE_GB, progress=progress)
    progress(f"installing SGLang {version} (once)")
    site = folder / "site"
    site.mkdir(parents=True)
    # Wheels only: a source build would want a Rust toolchain and end in a page of compiler errors.
    wheel = ["--no-deps", "--only-binary=sglang", "--target", str(site), f"sglang=={version}"]
    dependencies.install(dependencies.location(), wheel, what=f"SGLang {version}", lock=lock, progress=progress)
    record = next(iter(site.glob("sglang-*.dist-info/RECORD")), None)
    if record is None:
        raise EnvError(
            f"pip reported success but left no SGLang {version} in {site}",
            next_step="look at pip's own settings:  python -m pip config debug",
        )
    digest = hashlib.sha256(record.read_bytes()).hexdigest()
    marker = {"version": version, "closure": dependencies.key(), "python": dependencies.python_tag(), "record": digest}
    dependencies.write_marker(folder, marker)


def changed(env: EngineEnv) -> tuple[str, ...]:
    """Files of a ready environment's SGLang that are not as published; of a commit, which nobody published, none."""
    package = env.package
    return () if env.tree is not None or package is None else _changed(package.parent, env.left_out)


@cache
def _changed(site: Path, left_out: tuple[str, ...]) -> tuple[str, ...]:
    return changed_files(site, left_out=left_out)


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


def main(versions: Sequence[str]) -> int:
    """`python -m harness.engines.envs VERSION…`: what `make` calls before the tests. Exit codes as everywhere."""
    try:
        for version in versions:
            ensure(version, lambda line: print(line, file=sys.stderr, flush=True))
    except EnvError as error:
        print(f"eaglecheck: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnknownReleaseError | dependencies.HomeError) else 4
    except KeyboardInterrupt:
        print("eaglecheck: interrupted; type the same command again to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or (NEWEST,)))
