"""Paths that a command was given: what can be neither read nor made is refused before the command looks.

Those of options and arguments, and of the variables that name folders. It must not know what a path is for.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import typer

from harness.both_sides import lease_files
from harness.contract.outputs import unusable
from harness.contract.usage import UsageError

#: Variables of the environment that name folders of ours.
FOLDERS = ("EAGLECHECK_HOME", "EAGLECHECK_RUNS", lease_files.FOLDER)
#: How help's word for a path ends where '-' or a name may stand too, so that it is a text.
TEXTS = ("FILE", "DIR")
#: So many characters of a path show which one is meant.
SHOWN = 60


def check_paths(command: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """UsageError for the first path that nothing can be at. given: the command's parameters, by name."""
    for named, path, another in (*_variables(), *_typed(command, given)):
        if why := unusable(path):
            shown = path if len(path) <= SHOWN else f"{path[:SHOWN]}…"
            raise UsageError(f"{named} {shown}: {why}\n  name another place:  {another}")


def _variables() -> Iterator[tuple[str, str, str]]:
    for name in FOLDERS:
        if path := os.environ.get(name):
            yield name, path, f"export {name}=PATH"


def _typed(command: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(what help calls it, a path, what to type in its place) of each that was typed."""
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        _, info = get_args(parameter.annotation)
        for one in given[name] if isinstance(given[name], list) else [given[name]]:
            if isinstance(one, Path) or (one is not None and str(info.metavar).endswith(TEXTS)):
                named = _named(name, info)
                yield named, str(one), f"{named} PATH" if named.startswith("--") else named


def _named(name: str, info: Any) -> str:
    if isinstance(info, typer.models.ArgumentInfo):
        return str(info.metavar).strip("[].")
    names = [one for one in (info.default, *(info.param_decls or ())) if str(one).startswith("--")]  # as typer has it
    return names[0] if names else f"--{name.replace('_', '-')}"
