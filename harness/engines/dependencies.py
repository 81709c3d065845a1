"""The environment with everything that SGLang releases import on a CPU, and installing with pip.

Ordinary `venv` and `pip`, so that the machine's own pip configuration counts. A folder is finished when its
READY.json exists, written last and atomically; an unfinished folder is removed and built anew, never repaired.

This module must not know about SGLang releases (see `harness.engines.envs`) and must not import torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.contract import plain_files
from harness.contract.usage import UserError

Progress = Callable[[str], None]

REQUIREMENTS = Path(__file__).with_name("dependencies.txt")
MARKER = "READY.json"
NEED_GB = 3.5  # 2.2 installed with the CPU build of torch, and pip unpacks beside it
PULSE_SECONDS = 15.0
TAIL_LINES = 12  # what a pip failure shows: the cause is at the end


class EnvError(UserError):
    """An environment cannot be had: what happened, what would be allowed, what to type next."""

    exit_code = 3

    def __init__(self, what: str, *, allowed: str = "", next_step: str = "") -> None:
        self.what, self.allowed, self.next_step = what, allowed, next_step
        super().__init__("\n  ".join(part for part in (what, allowed, next_step) if part))


class HomeError(EnvError):
    """EAGLECHECK_HOME names a folder that cannot be written to: a usage error, nothing was tried."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended, with its last lines."""

    code: int
    tail: tuple[str, ...] = ()


def home() -> Path:
    """Where environments and checkpoints live: EAGLECHECK_HOME, else the user's cache directory."""
    if chosen := os.environ.get("EAGLECHECK_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache").absolute() / "eaglecheck"


def python_tag() -> str:
    """Minor version of the control interpreter; SGLang publishes one wheel per CPython, so engines use the same."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def version_here(name: str) -> str:
    """The version of a package in this very interpreter, which is not imported; empty where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def key() -> str:
    """Content hash of the pinned list (comments aside) and the Python it is installed for."""
    lines = (line.split("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    text = "\n".join([python_tag(), *(line for line in lines if line)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def location() -> Path:
    """The folder of the environment that this checkout needs; it may not exist yet."""
    return home() / f"closure-{key()}"


def interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def is_ready(folder: Path) -> bool:
    """Finished, and neither the interpreter nor torch has gone away since."""
    return read_marker(folder) is not None and interpreter(folder).exists() and torch_folder(folder).is_dir()


def torch_folder(folder: Path) -> Path:
    return folder / "lib" / f"python{python_tag()}" / "site-packages" / "torch"


def leftovers() -> tuple[Path, ...]:
    """Folders of dependencies that this checkout no longer uses."""
    return tuple(sorted(path for path in home().glob("closure-*") if path != location()))


def ensure(progress: Progress) -> Path:
    """Folder of the finished environment, built first where needed."""
    folder = location()
    if is_ready(folder):
        return folder
    with installing(folder.name, progress) as lock:
        if not is_ready(folder):
            _build(folder, lock=lock, progress=progress)
    return folder


def _build(folder: Path, *, lock: int, progress: Progress) -> None:
    start_afresh(folder, need_gb=NEED_GB, progress=progress)
    progress("installing what SGLang imports on a CPU: torch 2.13.0, triton, transformers, … (2.2 GB on disk, once)")
    venv = [sys.executable, "-m", "venv", str(folder)]
    done = run(venv, lock=lock, progress=progress)
    if done.code:
        raise _failure("Python could not make a virtual environment", venv, done)
    install(folder, ["-r", str(REQUIREMENTS)], what="SGLang's dependencies", lock=lock, progress=progress)
    packages = [str(torch_folder(folder).parent)]
    torch = next((d.version for d in metadata.distributions(name="torch", path=packages)), "unknown")
    write_marker(folder, {"key": key(), "python": python_tag(), "torch": torch})
    for old in leftovers():
        progress(f"no longer used by this checkout:  rm -r {shlex.quote(str(old))}")


def install(folder: Path, arguments: Sequence[str], *, what: str, lock: int, progress: Progress) -> None:
    """Run the environment's own pip; EnvError with its last lines when it fails."""
    pip = [str(interpreter(folder)), "-I", "-m", "pip", "install", "--progress-bar", "off", *arguments]
    done = run(pip, lock=lock, progress=progress)
    if done.code:
        raise _failure(f"pip could not install {what}", pip, done)


def _failure(what: str, command: Sequence[str], done: Finished) -> EnvError:
    if any("No space left on device" in line for line in done.tail):
        return EnvError(
            f"{what}: no space left on device ({free_gb(home()):.1f} GB free at {home()})",
            next_step="free some space, or choose another disk:  export EAGLECHECK_HOME=/path/with/space; "
            "pip also unpacks under TMPDIR",
        )
    tail = "\n    ".join(done.tail) or "(it printed nothing)"
    return EnvError(
        f"{what} (exit {done.code}); its last lines:\n    {tail}",
        next_step=f"type the same command again to resume; by hand it is:\n    {shlex.join(command)}",
    )


def run(command: Sequence[str], *, lock: int, progress: Progress) -> Finished:
    """Run a command to its end, reporting large downloads; the child inherits the lock, see `installing`."""
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with (
        _pulse(progress),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", pass_fds=(lock,)
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                tail.append(line.rstrip())
                if large := _large_download(line):
                    progress(large)
        except BaseException:
            child.terminate()
            raise
    return Finished(code=child.returncode, tail=tuple(tail))


@contextmanager
def _pulse(progress: Progress) -> Iterator[None]:
    """Say every PULSE_SECONDS that it goes on: pip is silent for minutes while it fetches and unpacks."""
    done, start = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(PULSE_SECONDS):
            progress(f"still installing ({time.monotonic() - start:.0f} s)")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _large_download(line: str) -> str:
    """`downloading torch-2.13.0-….whl (754 MB)` for files of 10 MB and more, else nothing."""
    found = re.match(r"\s*Downloading (?:\S*/)?(\S+) \(([\d.]+) ([MG])B\)", line)
    if not found or (found[3] == "M" and float(found[2]) < 10):
        return ""
    return f"downloading {found[1]} ({found[2]} {found[3]}B)"


@contextmanager
def installing(name: str, progress: Progress) -> Iterator[int]:
    """One installer at a time for `name`; yields the lock's descriptor, to be passed on to children.

    Not a FileLock: pip must inherit the lock, so that after a SIGKILL of its parent the next installer waits for the
    orphan instead of building in the same folder. The OS frees the lock when the last holder ends.
    """
    path = home() / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise HomeError(
            f"cannot write to {home()}: {error.strerror}", next_step="choose a folder:  export EAGLECHECK_HOME=/path"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting: another process is installing {name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


@contextmanager
def workplace() -> Iterator[Path]:
    """An empty folder for what is renamed into its place when it is whole; gone afterwards, whatever happens.

    What a killed call left goes first, so whoever asks holds a lock (see `installing`). EnvError for an OSError.
    """
    folder = home() / ".incoming"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        raise EnvError(
            f"cannot read or write{f' {error.filename}' if error.filename else ''}: {error.strerror or error}",
            next_step="make room, or choose another place:  export EAGLECHECK_HOME=/path; then type the same again",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_afresh(folder: Path, *, need_gb: float, progress: Progress) -> None:
    """Remove what an interrupted or outdated installation left at `folder`, then see that there is room."""
    if os.path.lexists(folder):
        progress(f"removing an unfinished or outdated {folder.name}")
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:  # a file, or a link that leads nowhere
            folder.unlink()
    check_room(need_gb, what=f"for {folder.name}")


def check_room(need_gb: float, *, what: str) -> None:
    """EnvError where so much does not fit on the disk."""
    if (free := free_gb(home())) < need_gb:
        raise EnvError(
            f"not enough disk space {what}: {free:.1f} GB free at {home()}, {need_gb:.1f} GB needed",
            next_step="free some space, or choose another disk:  export EAGLECHECK_HOME=/path/with/space",
        )


def free_gb(path: Path) -> float:
    """Room on the disk that `path` is on, or would be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / 1e9


def read_marker(folder: Path) -> dict[str, Any] | None:
    """What READY.json says; None where there is none, or it is not whole."""
    return read_json(folder / MARKER)


def write_marker(folder: Path, data: dict[str, Any]) -> None:
    """Declare the folder finished."""
    write_json(folder / MARKER, data)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none, or it is not whole."""
    try:
        data = json.loads(plain_files.content(path))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: Path, data: dict[str, Any]) -> None:
    plain_files.replace(path, (json.dumps(data, indent=1) + "\n").encode())
