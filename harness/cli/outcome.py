"""From outcome or error to exit code: the one place where both meet.

It must not hide an error: what is not foreseen is our own fault and exits 4 with its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from harness.contract.types import Outcome
from harness.contract.usage import UsageError


class Exit(IntEnum):
    """What the process says to whoever started it."""

    PASS = 0
    DIVERGENCE = 1
    USAGE = 2
    UNKNOWN = 3
    FAULT = 4


BY_OUTCOME = {Outcome.PASS: Exit.PASS, Outcome.FAIL: Exit.DIVERGENCE, Outcome.UNKNOWN: Exit.UNKNOWN}


#: No room where output goes, which may be standard output itself.
FULL = (errno.ENOSPC, errno.EDQUOT)


#: What stood behind `eaglecheck` when the command that runs now was called.
TYPED: ContextVar[tuple[str, ...] | list[str]] = ContextVar("typed", default=())


def guarded(command: Callable[..., Exit]) -> Callable[..., None]:
    """Run a command and leave with its exit code; foreseen errors become one message on standard error."""

    @functools.wraps(command)
    def call(*args: Any, **kwargs: Any) -> None:
        raise typer.Exit(int(_attempt(command, args, kwargs)))

    return call


def _attempt(command: Callable[..., Exit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exit:
    try:
        with termination_as_interrupt():
            return command(*args, **kwargs)
    except KeyboardInterrupt as stop:
        return say("; ".join([str(stop) or "interrupted", *_notes(stop)]), Exit.UNKNOWN)
    except (BrokenPipeError, SystemExit):  # rich makes the one into the other, with the exit code of a divergence
        return _reader_gone()
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            return _no_room(error)
        code = _foreseen(error)
        if code is None:
            traceback.print_exc()
            return say("this is a fault in eaglecheck itself; please report it with the lines above", Exit.FAULT)
        return say("\n  ".join([str(error), *_instead(error), *_notes(error)]), code)


def _no_room(error: OSError) -> Exit:
    _reader_gone()
    return say(f"cannot write: {error.strerror}\n  make room, or name another place", Exit.UNKNOWN)


@contextlib.contextmanager
def full_output_told() -> Iterator[None]:
    """For what is printed outside of commands: a full disk behind standard output ends it as it ends a command."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise SystemExit(int(_no_room(error))) from error


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that the engine ends and its folder is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}  # an ignored one stays so: nohup
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reader_gone() -> Exit:
    """Whoever read our output left (`| head`): nobody is there to be told, and the flush at exit must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.UNKNOWN


def _instead(error: Exception) -> list[str]:
    """The same command with the folder that may have been meant, for one that is not there."""
    wrong, instead = getattr(error, "wrong", None), getattr(error, "instead", None)
    typed = typed_with(wrong, instead) if isinstance(wrong, Path) and isinstance(instead, Path) else ""
    return [f"for example:  {typed}"] if typed else []


def typed_with(wrong: Path, right: Path) -> str:
    """What was typed, with another path in place of one in it; empty outside a command, and where it is not in it."""
    typed = TYPED.get()
    if wrong not in map(Path, typed):
        return ""
    return shlex.join(["eaglecheck", *(str(right) if Path(part) == wrong else part for part in typed)])


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _foreseen(error: Exception) -> Exit | None:
    """The exit code of an error we know; those of the reference by class name, since importing it imports torch."""
    from cases.catalogue import CaseError
    from cases.checkpoints import CheckpointMakeError
    from harness.archive.store import StoreError, WriteError
    from harness.archive.trace_faults import TraceError
    from harness.cli.documents import OutputError
    from harness.driving.drive import ScriptError
    from harness.engines.closure import EnvError, HomeError
    from harness.engines.envs import UnknownReleaseError

    if isinstance(error, WriteError):
        return Exit.UNKNOWN
    usage = (
        *(UsageError, UnknownReleaseError, HomeError, OutputError, CaseError, CheckpointMakeError),
        ScriptError,
    )
    if isinstance(error, (*usage, TraceError, StoreError)) or type(error).__name__ == "CheckpointError":
        return Exit.USAGE
    return Exit.UNKNOWN if isinstance(error, EnvError) else None


def say(text: str, code: Exit) -> Exit:
    """One message on standard error; returns the code that goes with it."""
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"eaglecheck: {text}")
    sys.stderr.flush()
    return code
