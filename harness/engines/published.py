"""Which releases of SGLang are published, from pip's own client, so that the machine's pip configuration counts.

The list is kept for a while; without an index an older list or the installed releases are used, and `note` says so.
It must not install anything.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness.contract import plain_files
from harness.engines import closure

#: A list younger than this is used without asking again.
FRESH_SECONDS = 12 * 3600.0
ASK_SECONDS = 60.0
LINE = "Available versions:"


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
    if kept is not None:
        when = time.strftime("%Y-%m-%d", time.gmtime(kept[1]))
        return Published(versions=kept[0], note=f"pip could not list the releases ({why}); using the list of {when}")
    here = installed()
    note = f"pip could not list the releases ({why}); using those installed here only"
    return Published(versions=here, note=note, complete=False)


def installed() -> tuple[str, ...]:
    """The releases whose installation here was finished, oldest first."""
    folders = (closure.home() / "engines").glob("*")
    return ordered([folder.name for folder in folders if closure.read_marker(folder) is not None])


def ordered(versions: Sequence[str]) -> tuple[str, ...]:
    """Versions, oldest first; what is no version is left out."""
    found: list[tuple[Version, str]] = []
    for name in dict.fromkeys(versions):
        try:
            found.append((Version(name), name))
        except InvalidVersion:
            continue
    return tuple(name for _, name in sorted(found))


def span(versions: Sequence[str], ends: tuple[str, str]) -> tuple[str, ...]:
    """`ends` and the versions between them, oldest first; pre-releases only where they are an end."""
    low, high = sorted(Version(end) for end in ends)
    inside = [name for name in versions if low < Version(name) < high and not Version(name).is_prerelease]
    return ordered([*ends, *inside])


def _ask_pip() -> tuple[tuple[str, ...], str]:
    """(versions, "") or ((), what pip said)."""
    command = [sys.executable, "-I", "-m", "pip", "index", "versions", "sglang", "--disable-pip-version-check"]
    if not _has_pip():
        command[0] = str(closure.interpreter(closure.location()))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), type(error).__name__ if isinstance(error, subprocess.TimeoutExpired) else str(error)
    line = next((one for one in done.stdout.splitlines() if one.startswith(LINE)), "")
    names = ordered([name.strip() for name in line[len(LINE) :].split(",")])
    said = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return (names, "") if names else ((), said)


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _read() -> tuple[tuple[str, ...], float] | None:
    try:
        data = json.loads(plain_files.content(_path()))
        return tuple(str(name) for name in data["versions"]), float(data["when"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(versions: Sequence[str]) -> None:
    partial = _path().with_name(f"published.json.{os.getpid()}.part")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"versions": list(versions), "when": time.time()}) + "\n")
        os.replace(partial, _path())
    except OSError:
        return  # a list that cannot be kept is asked for again


def _path() -> Path:
    return closure.home() / "published.json"
