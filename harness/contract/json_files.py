"""Reads JSON of users and other programs: one UTF-8 document, strictly, into a pydantic model.

The messages are the libraries' own, with the place, the nearest name and the allowed keys added. It must not
open files (see `plain_files`) and must not know any particular model.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harness.contract.usage import meant

Model = TypeVar("Model", bound=BaseModel)

#: Keys that hold the number of a format. Python holds true and 1.0 for equal to 1, a Literal[1] does too.
VERSIONS = ("schema_version", "schema", "case_schema", "store_version", "trace_schema")
#: Longer values are not repeated.
SHOWN = 60


class BadDocument(ValueError):
    """A document that cannot be used; the text says where and why, but not which document."""


class NotJSON(BadDocument):
    """Content that is not one JSON document."""


def parsed(content: bytes) -> Any:
    """The value that `content` holds; NotJSON for anything else, for NaN, and for a key that is there twice."""
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError as error:
        raise NotJSON("its brackets are nested too deep") from error
    except NotJSON:
        raise
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise NotJSON(str(error).split("; use sys.", 1)[0]) from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise NotJSON(f"duplicate key {twice!r} in the object with the keys {', '.join(found)}")
    return found


def _no_number(name: str) -> NoReturn:
    raise NotJSON(f"{name} is not a number in JSON")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How another version of a format spells what a model calls by its own names; nothing is spelled otherwise.

    written: a key of the object at a path, by the model's name, as the document spells it; today: what the model calls
    a key that only another version has, '' for none; word: the same of a value.
    """

    written: Callable[[Sequence[str | int], str], str] = lambda _path, key: key
    today: Callable[[Sequence[str | int], str], str] = lambda _path, _key: ""
    word: Callable[[Sequence[str | int], str], str] = lambda _path, _value: ""


def validated(content: object, model: type[Model], *, spelling: Spelling = Spelling()) -> Model:
    """`content`, as JSON or TOML gave it, as a `model`; BadDocument for anything that does not fit, "1" for 1 too."""
    if isinstance(content, Mapping):
        for key in VERSIONS:
            if key in content and type(content[key]) is not int:
                raise BadDocument(f"{key}: Input should be a valid integer, found {shown(content[key])}")
    try:
        return model.model_validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        raise BadDocument(_described(error, model, spelling)) from error


def shown(value: object) -> str:
    """A value as it stands in a document, or what it is where that is long."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def _described(error: ValidationError, model: type[BaseModel], spelling: Spelling) -> str:
    """'place: message', of the first fault. An unknown key comes first: it explains why another one is missing."""
    faults = error.errors(include_url=False)
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    path = fault["loc"]
    spelled = [spelling.written(path[:at], one) if isinstance(one, str) else one for at, one in enumerate(path)]
    place = ".".join(map(str, spelled)) or "the document"
    more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{place}: {_message(fault, model, spelling)}{more}{_allowed(fault, model, spelling)}"


def _message(fault: ErrorDetails, model: type[BaseModel], spelling: Spelling) -> str:
    said, value, path = fault["msg"].removeprefix("Value error, "), fault["input"], fault["loc"]
    match fault["type"]:
        case "extra_forbidden":
            key = str(path[-1])
            if today := spelling.today(path[:-1], key):
                return f"unknown key {key!r}; it is called {today!r} in this version"
            return f"unknown key {key!r}{meant(key, _spelled_keys(path[:-1], model, spelling))}"
        case "missing" | "value_error" | "json_invalid":
            return said
        case "literal_error" if isinstance(value, str):
            today = spelling.word(path, value)
            near = f"; it is called {today!r} in this version" if today else meant(value, re.findall(r"'(.*?)'", said))
            return f"{said}, found {shown(value)}{near}"
        case "less_than_equal" | "greater_than_equal":
            why = _reason(model, path) if fault["type"] == "less_than_equal" else ""
            return f"{said}, found {shown(value)}{why}"
    return f"{said}, found {shown(value)}"


def _reason(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """Why a number may not be larger: the description of its field."""
    field = _at(model, path[:-1]).model_fields.get(str(path[-1]))
    return f"; {field.description}" if field is not None and field.description else ""


def _allowed(fault: ErrorDetails, model: type[BaseModel], spelling: Spelling) -> str:
    if fault["type"] not in ("extra_forbidden", "missing"):
        return ""
    return f"\n  allowed keys: {', '.join(_spelled_keys(fault['loc'][:-1], model, spelling))}"


def _spelled_keys(path: Sequence[str | int], model: type[BaseModel], spelling: Spelling) -> list[str]:
    """The keys of the object at `path`, as the document spells them."""
    return [spelling.written(path, key) for key in _keys(_at(model, path))]


def _keys(model: type[BaseModel]) -> list[str]:
    """As they are written in a document."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _at(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """The model that stands at `path` inside `model`; the last one that can be followed."""
    for part in path:
        fields = (field for name, field in model.model_fields.items() if part in (name, field.alias))
        model = next((inner for field in fields if (inner := _model_in(field.annotation))), model)
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The first model named in a type such as `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)
