"""How a command ends: exit codes, errors as one message on standard error, and what an interrupt leaves behind.

It must not hide an error: one that is not a `UserError` is an internal error and exits 4 with its traceback.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from harness.archive.faults import FULL
from harness.cli.paths import check_paths
from harness.contract.outputs import write_json
from harness.contract.types import Outcome
from harness.engines.processes import handled, interrupts_held


class Exit(IntEnum):
    """What the process says to whoever started it."""

    PASS = 0
    DIVERGENCE = 1
    USAGE = 2
    UNKNOWN = 3
    FAULT = 4


BY_OUTCOME = {Outcome.PASS: Exit.PASS, Outcome.FAIL: Exit.DIVERGENCE, Outcome.UNKNOWN: Exit.UNKNOWN}


#: What stood behind `eaglecheck` when the command that runs now was called.
TYPED: ContextVar[Sequence[str]] = ContextVar("typed", default=())


def guarded(command: Callable[..., Exit]) -> Callable[..., None]:
    """Run a command and leave with its exit code; errors of a user become one message on standard error."""

    @functools.wraps(command)
    def call(**given: Any) -> None:
        def checked() -> Exit:
            check_paths(command, given)
            return command(**given)

        raise typer.Exit(int(attempt(checked)))

    return call


def attempt(command: Callable[[], Exit]) -> Exit:
    """The exit code of a command, whatever it raises."""
    try:
        with termination_as_interrupt():
            return command()
    except KeyboardInterrupt as stop:
        return say("\n  ".join([str(stop) or "interrupted", *_notes(stop)]), Exit.UNKNOWN)
    except (BrokenPipeError, SystemExit):  # rich makes the one into the other, with the exit code of a divergence
        return _reader_gone()
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            return _no_room(error)
        code = getattr(error, "exit_code", None)  # of a UserError; the reference's own errors have one too
        if code is None:
            traceback.print_exc()
            return say("internal error in eaglecheck; please report it with the lines above", Exit.FAULT)
        return say("\n  ".join([str(error), *_instead(error), *_notes(error)]), Exit(code))


def say(text: str, code: Exit) -> Exit:
    """One message on standard error; returns the code that goes with it."""
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"eaglecheck: {text}")
    sys.stderr.flush()
    return code


@contextlib.contextmanager
def full_output_reported() -> Iterator[None]:
    """For what is printed outside of commands: a full disk behind standard output ends it as it ends a command."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise SystemExit(int(_no_room(error))) from error


def _no_room(error: OSError) -> Exit:
    _reader_gone()
    where = f" to {error.filename}" if error.filename else ""
    return say(f"cannot write{where}: {error.strerror}\n  make room, or name another place", Exit.UNKNOWN)


def _reader_gone() -> Exit:
    """Whoever read our output left (`| head`): nothing can be reported, and the flush at exit must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.UNKNOWN


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that the engine ends and its folder is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    with handled(heeded, stop):  # an ignored one stays so: nohup
        yield


@contextlib.contextmanager
def kept(
    target: str | None, document: Callable[[KeyboardInterrupt], dict[str, Any]], *, left: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """While this block runs, an interrupt writes `document` (of what there is) to the --json target before it goes on.

    left: what to say of what is left behind, and what to type next.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if target is not None:
            with interrupts_held():  # a second Ctrl-C must not cut the file off
                write_json({**document(stop), "interrupted": True}, target)
            stop.add_note(f"partial results written to {'standard output' if target == '-' else target}")
        if said := left():
            stop.add_note(said)
        raise


def typed_again(*, without: Sequence[str] = (), more: Sequence[str] = ()) -> str:
    """The command as it was typed, less these flags and with these options; empty outside a command.

    more: options, each with its value, in the place of any that were typed by the same name.
    """
    typed, named = TYPED.get(), set(more[::2])
    left = [
        part
        for before, part in zip(["", *typed], typed, strict=False)
        if before not in named and part not in without and part.partition("=")[0] not in named
    ]
    return shlex.join(["eaglecheck", *left, *more]) if typed else ""


def _instead(error: Exception) -> list[str]:
    """The same command with the folder that may have been meant, for one that is not there."""
    wrong, right = getattr(error, "wrong", None), getattr(error, "instead", None)
    typed = TYPED.get()
    if not isinstance(wrong, Path) or not isinstance(right, Path) or wrong not in map(Path, typed):
        return []
    words = (str(right) if Path(part) == wrong else part for part in typed)
    return [f"for example:  {shlex.join(['eaglecheck', *words])}"]


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
