"""What is wrong with a file that pydantic refused, in words: the place, the fault, what is allowed there, the nearest.

It must not read files and must not know any particular model.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from harness.contract.words import meant


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of `error`, raised while reading `model`; several lines, no trailing newline."""
    fault = error.errors(include_url=False)[0]
    path = fault["loc"]
    where = ".".join(str(part) for part in path) or "the whole"
    if fault["type"] == "extra_forbidden":
        return _unknown_key(where, path, model)
    text = fault["msg"].removeprefix("Value error, ")
    found = fault.get("input")
    shown = f", not {found!r}" if isinstance(found, str | int | float | bool | None) and path else ""
    if fault["type"] == "missing":
        return f"{where}: is missing\n  allowed keys: {', '.join(_inner(model, path[:-1]).model_fields)}"
    more = error.error_count() - 1
    return f"{where}: {text}{shown}" + (f" ({more} more like this)" if more else "")


def _unknown_key(where: str, path: Sequence[str | int], model: type[BaseModel]) -> str:
    allowed = list(_inner(model, path[:-1]).model_fields)
    return (
        f"{where}: unknown key {str(path[-1])!r}{meant(str(path[-1]), allowed)}\n  allowed keys: {', '.join(allowed)}"
    )


def _inner(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """The model that stands at `path` inside `model`; the last one that can be followed."""
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The first model named in a type such as `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)
