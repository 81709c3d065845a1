"""The options that say how an engine runs, for every command that starts engines: five of them, one meaning.

It must not check their values (see `harness.driving.adapt`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from harness.cli import options
from harness.driving.adapt import Wanted

R = TypeVar("R")

#: By the field of `Wanted` that they fill, in the order of the help.
OPTIONS: dict[str, Any] = {
    "dtype": options.Dtype,
    "backend": options.Backend,
    "graphs": options.Graphs,
    "overlap": options.Overlap,
    "page": options.Page,
}
assert list(OPTIONS) == [field.name for field in fields(Wanted)]


def engine_options(command: Callable[..., R]) -> Callable[..., R]:
    """A command that takes `wanted: Wanted`, with one option a field in its place; under `guarded`."""

    @functools.wraps(command)
    def call(**given: Any) -> R:
        wanted = Wanted(**{name: given.pop(name) for name in OPTIONS})
        return command(**given, wanted=wanted)

    keyword = inspect.Parameter.KEYWORD_ONLY
    found: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name != "wanted":
            found.append(parameter.replace(kind=keyword))
            continue
        for name, annotation in OPTIONS.items():
            found.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    call.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    return call
