"""JSON that somebody wrote, read without guessing: what is no JSON, or says a thing twice, is refused in our own words.

It must not read files and must not know what a document means.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

#: What the decoder of Python's library calls a fault (the beginning of it), and what it is called here.
FAULTS = {
    "Expecting value": "a value is missing, or is none that JSON has",
    "Expecting property name": "a key in double quotes is missing",
    "Expecting ':'": "a colon is missing behind a key",
    "Expecting ','": "a comma or a closing bracket is missing",
    "Unterminated string": "a text in double quotes is not closed",
    "Extra data": "something follows behind the end of the document",
    "Invalid control character": "a text in double quotes goes over the end of its line",
    "Invalid \\": "a backslash is followed by something that JSON does not have",
    "Illegal trailing comma": "a comma stands before a closing bracket",
}
OTHER = "it cannot be read on from there"


class NotJSON(ValueError):
    """Content that is no JSON, or not unmistakably one document; the text ends the sentence "FILE is not JSON: …"."""


def parsed(content: bytes) -> Any:
    """The value that `content` holds. NotJSON for anything but one document in UTF-8 with every key there once."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotJSON(f"byte {error.start} is not UTF-8 text") from error
    if not text.strip():
        raise NotJSON("it is empty")
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        said = next((ours for theirs, ours in FAULTS.items() if error.msg.startswith(theirs)), OTHER)
        raise NotJSON(f"line {error.lineno}, column {error.colno}: {said}") from error
    except NotJSON:
        raise
    except RecursionError as error:
        raise NotJSON("its brackets are nested too deep") from error
    except ValueError as error:  # the only one left: more digits than Python turns into a number
        raise NotJSON("a number in it has thousands of digits") from error
    return found


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise NotJSON(f"key {twice!r} is there twice in the object with the keys {', '.join(found)}; keep one of them")
    return found


def _no_number(name: str) -> NoReturn:
    raise NotJSON(f"{name} is no number that JSON has")
