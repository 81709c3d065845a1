"""What is wrong with a document that somebody wrote: the place, the fault, what is allowed there, the nearest.

Everything is in our own words. It must not read files and must not know any particular model.
"""

from __future__ import annotations

import datetime
import json
import typing
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from harness.contract.words import meant

Model = TypeVar("Model", bound=BaseModel)

#: Keys that hold the number of a format, which true and 1.0 are not, though Python holds them for equal to 1.
VERSIONS = ("schema_version", "schema", "case_schema", "store_version", "trace_schema")
#: Types in words.
KINDS: dict[object, str] = {datetime.date: "a date such as 2027-05-31"}
#: Longer values are not repeated.
SHOWN = 60


class Unfit(ValueError):
    """A document that cannot be used; the text says where, why and what is allowed there, but not which document."""


def validated(content: object, model: type[Model]) -> Model:
    """`content`, as JSON or TOML gave it, as a `model`; Unfit for anything that is off, a number in quotes too."""
    if isinstance(content, Mapping):
        for key in VERSIONS:
            if key in content and type(content[key]) is not int:
                raise Unfit(f"{key} is {shown(content[key])}, which is no whole number\n  allowed: 1")
    try:
        return model.model_validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        raise Unfit(explain(error, model)) from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of `error`, raised while reading `model`; several lines, no trailing newline."""
    faults = error.errors(include_url=False)
    # a name that is not known explains why another is missing
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    path = fault["loc"]
    where = ".".join(str(part) for part in path) or "the whole"
    if fault["type"] == "extra_forbidden":
        return _unknown_key(where, path, model)
    if fault["type"] == "missing":
        return f"{where}: is missing\n  allowed keys: {', '.join(_keys(_inner(model, path[:-1])))}"
    if fault["type"] in ("value_error", "assertion_error"):
        return f"{where}: {fault['msg'].removeprefix('Value error, ').removeprefix('Assertion failed, ')}{_more(error)}"
    if fault["type"].startswith("json"):
        return f"{where}: holds text that is no Unicode, or is no JSON"
    value = fault.get("input")
    near = _near(value, model, path) or (
        ", in quotes" if isinstance(value, str) and "a text" not in _allowed(model, path) else ""
    )
    return f"{where}: {shown(value)} cannot stand there{near}{_more(error)}\n  {_allowed(model, path)}"


def shown(value: object) -> str:
    """A value as it stands in a document, or what it is where that is long."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def _more(error: ValidationError) -> str:
    more = error.error_count() - 1
    return f" ({more} more like this)" if more else ""


def _unknown_key(where: str, path: Sequence[str | int], model: type[BaseModel]) -> str:
    allowed = _keys(_inner(model, path[:-1]))
    return (
        f"{where}: unknown key {str(path[-1])!r}{meant(str(path[-1]), allowed)}\n  allowed keys: {', '.join(allowed)}"
    )


def _keys(model: type[BaseModel]) -> list[str]:
    """As they are written in a document."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _inner(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """The model that stands at `path` inside `model`; the last one that can be followed."""
    for part in path:
        field = _field(model, part)
        model = (None if field is None else _model_in(field.annotation)) or model
    return model


def _field(model: type[BaseModel], part: str | int) -> FieldInfo | None:
    return next((field for name, field in model.model_fields.items() if part in (name, field.alias)), None)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The first model named in a type such as `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)


def _near(value: object, model: type[BaseModel], path: Sequence[str | int]) -> str:
    """'; did you mean …?' for a word that is none of those allowed."""
    field = _last_field(model, path)
    words = [] if field is None else [str(word) for word in _words(field.annotation)]
    return meant(value, words) if isinstance(value, str) and words else ""


def _last_field(model: type[BaseModel], path: Sequence[str | int]) -> FieldInfo | None:
    """The field that the last name in `path` stands for."""
    names = [at for at, part in enumerate(path) if isinstance(part, str)]
    return _field(_inner(model, path[: names[-1]]), path[names[-1]]) if names else None


def _words(annotation: object) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [word for part in typing.get_args(annotation) for word in _words(part)]


def _allowed(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """'allowed: …' from the types and limits of the field; its description is the reason for its limits."""
    field = _last_field(model, path)
    if field is None:
        return f"allowed: an object with the keys {', '.join(_keys(_inner(model, path[:-1])))}"
    inside = isinstance(path[-1], int)
    said = _described(field.annotation, [] if inside else field.metadata, inside=inside)
    return f"allowed: {said}" + (f"; {field.description}" if field.description else "")


def _described(annotation: object, limits: Sequence[object], *, inside: bool = False) -> str:
    """A type in words. inside: of what stands in its list."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _described(parts[0], [*_flat(parts[1:]), *limits], inside=inside)
    if origin is typing.Literal:
        return ", ".join(json.dumps(word) for word in parts)
    if origin in (typing.Union, UnionType):
        return " or ".join(_described(part, limits, inside=inside) for part in parts)
    if origin in (tuple, list):
        held = _described(parts[0], [])
        return held if inside else f"a list{_span(limits, ' of', 'entry', 'entries')}, each {held}"
    if origin is dict:
        return f"an object, each value {_described(parts[1], [])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"an object with the keys {', '.join(_keys(annotation))}"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _range(limits)
    if annotation is str:
        pattern = _limit(limits, "pattern")
        return "a text in quotes" + (f" like {pattern}" if pattern else _span(limits, " of", "character", "characters"))
    return {bool: "true or false", NoneType: "null"}.get(annotation, _name(annotation))


def _name(annotation: object) -> str:
    """An enumeration's words; of any other type its name."""
    members = getattr(annotation, "__members__", None)
    return (
        ", ".join(json.dumps(str(one)) for one in members)
        if members
        else KINDS.get(annotation, "another kind of value")
    )


def _flat(limits: Sequence[object]) -> list[object]:
    return [part for one in limits for part in (one.metadata if isinstance(one, FieldInfo) else [one])]


def _limit(limits: Sequence[object], *names: str) -> Any:
    """The first of these limits that is set; None without one."""
    values = (getattr(one, name, None) for name in names for one in _flat(limits))
    return next((value for value in values if value is not None), None)


def _range(limits: Sequence[object]) -> str:
    low, above, high = _limit(limits, "ge"), _limit(limits, "gt"), _limit(limits, "le", "lt")
    if low is not None:
        return f" from {low} to {high}" if high is not None else f", {low} or more"
    return (f" above {above}" if above is not None else "") + (f" up to {high}" if high is not None else "")


def _span(limits: Sequence[object], word: str, one: str, many: str) -> str:
    least, most = _limit(limits, "min_length"), _limit(limits, "max_length")
    if least is None and most is None:
        return ""
    if most is None:
        return f"{word} {least} {one if least == 1 else many} or more"
    return f"{word} {least or 0} to {most} {many}"
