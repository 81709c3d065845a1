"""What a model allows at a place in a document, in words, as its JSON schema has it. It must not validate anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

Schema = Mapping[str, Any]
NAMES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "object": "an object",
    "string": "text",
}


class Place:
    """What a model's schema has at `path`: nothing where it does not say."""

    def __init__(self, model: type[BaseModel], path: Sequence[str | int]) -> None:
        self._whole: Schema = model.model_json_schema()
        self._found: Schema = self._whole
        for part in path:
            self._found = next((inner for one in self._choices(self._found) if (inner := _inside(one, part))), {})

    @property
    def words(self) -> str:
        """What may stand there."""
        return self._words(self._found)

    @property
    def typed(self) -> str:
        """The same of an option, which is left out instead of null."""
        return self.words.removesuffix(" or null")

    @property
    def keys(self) -> list[str]:
        """Of an object there."""
        return next((list(one["properties"]) for one in self._choices(self._found) if "properties" in one), [])

    @property
    def why(self) -> str:
        """What the field says of itself."""
        return str(self._found.get("description", ""))

    def _choices(self, schema: Schema) -> list[Schema]:
        """What a schema stands for: itself, what it refers to, or each of several."""
        if "$ref" in schema:
            return self._choices(self._whole["$defs"][str(schema["$ref"]).rpartition("/")[2]])
        return [found for one in schema.get("anyOf", ()) for found in self._choices(one)] or [schema]

    def _words(self, schema: Schema) -> str:
        said = (self._of_one(one) for one in self._choices(schema))
        return " or ".join(dict.fromkeys(one for one in said if one))

    def _of_one(self, schema: Schema) -> str:
        if listed := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
            return ", ".join(json.dumps(one) for one in listed)
        if schema.get("type") == "array":
            items = self._words(schema.get("items", {}))
            return f"a list{', not empty' * bool(schema.get('minItems'))}{f', each {items}' * bool(items)}"
        return scalar(schema)


def scalar(schema: Schema) -> str:
    """A number, text or the like, with its limits."""
    limits = [_range(schema), f"that fits {schema['pattern']}" if "pattern" in schema else ""]
    return " ".join(filter(None, [NAMES.get(str(schema.get("type")), ""), *limits]))


def _inside(schema: Schema, part: str | int) -> Schema:
    items = schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
    more = items or schema.get("additionalProperties")
    return more if isinstance(more, Mapping) else {}


def _range(schema: Schema) -> str:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if least is not None and most is not None:
        return f"from {_number(least)} to {_number(most)}"
    said = ((least, "from {} on"), (above, "above {}"), (most, "up to {}"), (below, "below {}"))
    return ", ".join(text.format(_number(limit)) for limit, text in said if limit is not None)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
