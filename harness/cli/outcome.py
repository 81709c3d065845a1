"""From outcome or error to exit code: the one place where both meet.

It must not hide an error: what is not foreseen is our own fault and exits 4 with its traceback.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import typer
from rich.console import Console

from harness.types import Outcome


class Exit(IntEnum):
    """What the process says to whoever started it."""

    PASS = 0
    DIVERGENCE = 1
    USAGE = 2
    UNKNOWN = 3
    FAULT = 4


BY_OUTCOME = {Outcome.PASS: Exit.PASS, Outcome.FAIL: Exit.DIVERGENCE, Outcome.UNKNOWN: Exit.UNKNOWN}


class UsageError(Exception):
    """Something the caller asked for cannot be; the text names it, what is allowed and what to type."""


def guarded(command: Callable[..., Exit]) -> Callable[..., None]:
    """Run a command and leave with its exit code; foreseen errors become one message on standard error."""

    @functools.wraps(command)
    def call(*args: Any, **kwargs: Any) -> None:
        raise typer.Exit(int(_attempt(command, args, kwargs)))

    return call


def _attempt(command: Callable[..., Exit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exit:
    try:
        return command(*args, **kwargs)
    except KeyboardInterrupt:
        return _say("interrupted: the engine was ended; a run folder without verdict.json is incomplete", Exit.UNKNOWN)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        code = _foreseen(error)
        if code is None:
            traceback.print_exc()
            return _say("this is a fault in eaglecheck itself; please report it with the lines above", Exit.FAULT)
        return _say(str(error), code)


def _foreseen(error: Exception) -> Exit | None:
    """The exit code of an error we know, by its class name: importing all of them here would import torch."""
    from harness.closure import EnvError
    from harness.documents import OutputError
    from harness.envs import UnknownReleaseError
    from harness.store import StoreError
    from harness.trace_io import TraceError

    if isinstance(error, UsageError | UnknownReleaseError | OutputError):
        return Exit.USAGE
    if type(error).__name__ in ("CheckpointError", "CheckpointMakeError", "CaseError", "ScriptError"):
        return Exit.USAGE
    if isinstance(error, TraceError):
        return Exit.USAGE
    if isinstance(error, StoreError):
        return Exit.UNKNOWN if "disk is full" in str(error) else Exit.USAGE
    if isinstance(error, EnvError):
        return Exit.UNKNOWN
    return None


def _say(text: str, code: Exit) -> Exit:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"eaglecheck: {text}")
    sys.stderr.flush()
    return code
