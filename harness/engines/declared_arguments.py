"""SGLang's arguments as a release's sources declare them: their types, and the values that its parser takes.

Nothing of SGLang is imported, and what is not written out in its sources is not known.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Types of which a text is no value.
NUMBERS = ("int", "float", "bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """choices: what its parser takes, empty where that is not known. number: int, float, bool, or empty for others."""

    choices: tuple[Any, ...] = ()
    number: str = ""

    def refuses(self, value: Any) -> str:
        """What is allowed instead of a value; empty where it may do."""
        if value is None:
            return ""
        if self.choices:
            several = value if isinstance(value, list) else [value]
            return "" if all(one in self.choices for one in several) else ", ".join(map(str, self.choices))
        return {"bool": "true or false"}.get(self.number, "a number") if self.number and isinstance(value, str) else ""


@functools.cache
def declared(package: Path) -> Mapping[str, Argument]:
    """By name, those with a type in the classes of arguments: of one file, in newer releases of a folder beside it too.

    package: the release's folder `sglang`.
    """
    files = (package / "srt" / "server_args.py", *sorted((package / "srt" / "arg_groups").rglob("*.py")))
    trees = [ast.parse(file.read_bytes()) for file in files if file.is_file()]
    found = dict(argument for tree in trees for argument in _fields(tree))
    for name, choices in (one for tree in trees for one in _added(tree)):
        if name in found and not found[name].choices:
            found[name] = Argument(choices=choices)
    return found


def _fields(tree: ast.Module) -> Iterator[tuple[str, Argument]]:
    for one in tree.body:
        for part in one.body if isinstance(one, ast.ClassDef) else ():
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield part.target.id, Argument(choices=_choices(part.annotation), number=_number(part.annotation))


def _added(tree: ast.Module) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name, choices) of `parser.add_argument("--name", choices=[…])`."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "add_argument":
            for flag in one.args[:1]:
                if isinstance(flag, ast.Constant) and (choices := _choices(one)):
                    yield str(flag.value).removeprefix("--").replace("-", "_"), choices


def _choices(node: ast.AST) -> tuple[Any, ...]:
    """Of `choices=[…]` or `Literal[…]` inside, where it is written out."""
    for one in ast.walk(node):
        if isinstance(one, ast.keyword) and one.arg == "choices":
            return _written_out(one.value)
        if isinstance(one, ast.Subscript) and isinstance(one.value, ast.Name) and one.value.id == "Literal":
            return _written_out(one.slice)
    return ()


def _written_out(node: ast.expr) -> tuple[Any, ...]:
    try:
        values = ast.literal_eval(node)
    except ValueError:
        return ()
    return tuple(values) if isinstance(values, (list, tuple)) else (values,)


def _number(node: ast.expr) -> str:
    """int, float or bool in `A[Optional[int], …]`; empty for any other type."""
    while isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ("A", "Optional"):
        node = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
    return node.id if isinstance(node, ast.Name) and node.id in NUMBERS else ""
