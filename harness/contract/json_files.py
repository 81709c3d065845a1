"""Reads JSON of users and other programs: one UTF-8 document, strictly, into a pydantic model.

The messages name the place, what stands there, the nearest name, and what is allowed. It must not open files (see
`plain_files`) and must not know any particular model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from harness.contract.allowed import Place
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
        found = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_no_number)
        if b"\\u" in content:
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        raise NotJSON(f"a text in it holds half of a character, \\u{ord(error.object[error.start]):x}") from error
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
    a key that only another version has, '' for none; word: the same of a value. foreign: what to say of a key that
    other programs have there.
    """

    written: Callable[[Sequence[str | int], str], str] = lambda _path, key: key
    today: Callable[[Sequence[str | int], str], str] = lambda _path, _key: ""
    word: Callable[[Sequence[str | int], str], str] = lambda _path, _value: ""
    foreign: Callable[[Sequence[str | int], str], str] = lambda _path, _key: ""


def validated(content: object, model: type[Model], *, spelling: Spelling = Spelling()) -> Model:
    """`content`, as JSON or TOML gave it, as a `model`; BadDocument for anything that does not fit, "1" for 1 too."""
    if isinstance(content, Mapping):
        for key in VERSIONS:
            if key in content and type(content[key]) is not int:
                raise BadDocument(f"{key}: found {shown(content[key])}\n  allowed: a whole number")
    try:
        return model.model_validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        raise BadDocument(_described(error, model, spelling)) from error


def shown(value: object) -> str:
    """A value as it stands in a document, or what it is where that is long."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def _described(error: ValidationError, model: type[BaseModel], spelling: Spelling) -> str:
    """'place: message', of the first fault, and what is allowed there; a message of ours says that itself.

    An unknown key comes first: it explains why another one is missing.
    """
    faults = error.errors(include_url=False)
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    path, value = fault["loc"], shown(fault["input"])
    spelled = [spelling.written(path[:at], one) if isinstance(one, str) else one for at, one in enumerate(path)]
    said = f"{'.'.join(map(str, spelled)) or 'the document'}: "
    keys = [spelling.written(path[:-1], key) for key in Place(model, path[:-1]).keys]
    match fault["type"]:
        case "extra_forbidden":
            key = str(path[-1])
            today = spelling.today(path[:-1], key)
            near = f"; it is called {today!r} in this version" if today else ""
            near = near or spelling.foreign(path[:-1], key) or meant(key, keys)
            return f"{said}unknown key {key!r}{near}\n  allowed keys: {', '.join(keys)}"
        case "missing":
            return f"{said}it is missing\n  allowed keys: {', '.join(keys)}"
        case "value_error" | "json_invalid":
            return said + fault["msg"].removeprefix("Value error, ")
    place, near = Place(model, path), ""
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        today = spelling.word(path, fault["input"])
        words = re.findall(r"'(.*?)'", fault["msg"])
        near = f"; it is called {today!r} in this version" if today else meant(fault["input"], words)
    why = f"; {place.why}" if fault["type"] == "less_than_equal" and place.why else ""
    return f"{said}found {value}{near}\n  allowed: {place.words or fault['msg']}{why}"
