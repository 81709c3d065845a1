"""Releases of SGLang: version names, which are published, and which can be driven.

A release of our tests is known by name. Any other is looked up when it is asked for, with pip's own client, so that the
machine's pip configuration counts; it installs over the same pinned dependencies, and is driven with the hooks of the
newest release before it that `harness.both_sides.compat` has a row for. This module must not install anything and must
not import sglang or torch.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness.both_sides import compat
from harness.contract.usage import nearest
from harness.engines import dependencies
from harness.engines.dependencies import EnvError

#: Our tests run on these, `make test` installs them.
SUPPORTED = ("0.5.11", "0.5.12.post1", "0.5.13", "0.5.23")
NEWEST = SUPPORTED[-1]
OLDEST = compat.RELEASES[-1].first
ANY_OTHER = f"any other published since {OLDEST}"

#: A list of published releases younger than this is used without asking again.
FRESH_SECONDS = 12 * 3600.0
ASK_SECONDS = 60.0
LINE = "Available versions:"


#: What to type where a checkout calls itself 0.0.0, as SGLang's own build has it without tags.
TAGS = (
    "a checkout without its tags calls itself so: fetch them and install it again:  "
    "git fetch --tags && pip install -e python"
)


class UnknownReleaseError(EnvError):
    """The caller named a release that this project cannot run here: a usage error, nothing was tried."""

    exit_code = 2

    def __init__(self, what: str, *, allowed: str, next_step: str = "") -> None:
        see = "see what there is:  eaglecheck engines list"
        super().__init__(what, allowed=allowed, next_step=next_step or see)


# -- names -------------------------------------------------------------------------------------------------------


def parsed(version: str) -> Version | None:
    """None for what is no version."""
    try:
        return Version(version)
    except InvalidVersion:
        return None


def same(left: str, right: str) -> bool:
    """Whether two spellings mean one release: 'v0.5.13' is 0.5.13."""
    return left == right or (parsed(left) is not None and parsed(left) == parsed(right))


def ordered(versions: Sequence[str]) -> tuple[str, ...]:
    """Versions, oldest first; what is no version is left out."""
    return tuple(sorted({name: None for name in versions if parsed(name) is not None}, key=Version))


def span(versions: Sequence[str], ends: tuple[str, str]) -> tuple[str, ...]:
    """`ends` and the versions between them, oldest first; pre-releases only where they are an end."""
    low, high = sorted(Version(end) for end in ends)
    inside = [name for name in versions if low < Version(name) < high and not Version(name).is_prerelease]
    return ordered([*ends, *inside])


def drivable(version: str) -> bool:
    """Whether there are hooks for a release of this name; what is no version has none."""
    wanted = parsed(version)
    return wanted is not None and wanted >= Version(OLDEST)


def check_drivable(version: str) -> None:
    """UnknownReleaseError for one without hooks."""
    if not drivable(version):
        what = f"SGLang {version} cannot be driven: there are no hooks for releases before {OLDEST}"
        nameless = version.startswith("0.0.0")
        raise UnknownReleaseError(what, allowed=choices("" if nameless else OLDEST), next_step=TAGS * nameless)


def standing(version: str) -> str:
    """What there is to say of a release that our tests do not run; empty for one that they do."""
    if version in SUPPORTED or not drivable(version):
        return ""
    row = next((one.first for one in compat.RELEASES if Version(one.first) <= Version(version)), OLDEST)
    hooks = "with hooks of its own" if same(row, version) else f"with the hooks of {row}"
    return f"not in our tests; driven {hooks}"


def named(version: str) -> str:
    """The release meant, spelled as published: one of our tests, one installed here, or any published since OLDEST.

    The index is asked only for a release that is neither of our tests nor installed.
    UnknownReleaseError for what is no version, is too old to be driven, or is not published.
    """
    if parsed(version) is None:
        raise UnknownReleaseError(f"unknown SGLang release {version!r}", allowed=choices(nearest(version, SUPPORTED)))
    check_drivable(version)
    near = next((name for name in (*SUPPORTED, *installed()) if same(name, version)), "")
    return near or _published(Version(version), published())


def _published(wanted: Version, there: Published) -> str:
    """The published spelling of `wanted`; UnknownReleaseError names the nearest that can be driven."""
    if found := next((name for name in there.versions if Version(name) == wanted), ""):
        return found
    allowed = choices(_after(wanted, [name for name in there.versions if drivable(name)]))
    if there.complete:
        raise UnknownReleaseError(f"no SGLang {wanted} is published", allowed=allowed)
    what = f"no SGLang {wanted} is installed here, and the published releases are not known"
    raise UnknownReleaseError(what, allowed=there.note or allowed)


def choices(near: str = "") -> str:
    """Every release that can be named, in words; near: the one that may have been meant."""
    others = f"in our tests: {', '.join(SUPPORTED)}; also {ANY_OTHER}"
    return f"{others}; nearest: {near}" if near else others


def _after(wanted: Version, known: Sequence[str]) -> str:
    """The first of `known` that is newer, else the last."""
    return next((name for name in known if Version(name) > wanted), known[-1] if known else NEWEST)


# -- what is published -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Releases, oldest first. note: where they are from, if not from the index just now."""

    versions: tuple[str, ...]
    note: str = ""
    complete: bool = True


def published() -> Published:
    """The published releases; without an index those of an older list, else those installed here."""
    kept = _read()
    if kept is not None and time.time() - kept[1] < FRESH_SECONDS:
        return Published(versions=kept[0])
    found, why = _ask_pip()
    if found:
        _write(found)
        return Published(versions=found)
    failed = f"pip could not list the releases ({why}); using"
    if kept is None:
        return Published(versions=installed(), note=f"{failed} those installed here only", complete=False)
    when = time.strftime("%Y-%m-%d", time.gmtime(kept[1]))
    return Published(versions=kept[0], note=f"{failed} the list of {when}")


def installed() -> tuple[str, ...]:
    """The releases whose installation here was finished, oldest first."""
    folders = (dependencies.home() / "engines").glob("*")
    return ordered([folder.name for folder in folders if dependencies.read_marker(folder) is not None])


def _ask_pip() -> tuple[tuple[str, ...], str]:
    """(versions, "") or ((), what pip said)."""
    own = importlib.util.find_spec("pip") is not None
    python = sys.executable if own else str(dependencies.interpreter(dependencies.location()))
    command = [python, "-I", "-m", "pip", "index", "versions", "sglang", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), type(error).__name__ if isinstance(error, subprocess.TimeoutExpired) else str(error)
    line = next((one for one in done.stdout.splitlines() if one.startswith(LINE)), "")
    names = ordered([name.strip() for name in line[len(LINE) :].split(",")])
    said = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return (names, "") if names else ((), said)


def _read() -> tuple[tuple[str, ...], float] | None:
    data = dependencies.read_json(_path()) or {}
    try:
        return tuple(str(name) for name in data["versions"]), float(data["when"])
    except (ValueError, KeyError, TypeError):
        return None


def _write(versions: Sequence[str]) -> None:
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        dependencies.write_json(_path(), {"versions": list(versions), "when": time.time()})
    except OSError:
        return  # a list that cannot be kept is asked for again


def _path() -> Path:
    return dependencies.home() / "published.json"
