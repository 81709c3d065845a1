"""What the parser of the command line refuses, in our words. It must not parse anything itself.

The parser is typer's, with its own copy of click in some versions: its errors are known by what they carry.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from harness.contract.words import nearest

#: What it takes, by the type in the command's own signature.
KINDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "nothing: it is there or it is not"}


def is_misread(error: Exception) -> bool:
    """Whether this is the parser's own refusal."""
    return hasattr(error, "format_message") and hasattr(error, "ctx")


def told(error: Any, typed: Sequence[str]) -> str:
    """The refusal, what is allowed, and what to type next. typed: what stood behind `eaglecheck`."""
    context = error.ctx
    command = " ".join(["eaglecheck", *[part for part in typed[:1] if not part.startswith("-")]])
    path = command if context is None else context.command_path
    usage = "" if context is None else f"\n  {' '.join(context.get_usage().split())}"
    return f"{_fault(error, typed)}{usage}\n  see all of it:  {path} --help"


def _fault(error: Any, typed: Sequence[str]) -> str:
    command = None if error.ctx is None else error.ctx.command
    said = error.format_message()
    kind = type(error).__name__
    if kind == "NoArgsIsHelpError":
        return f"which of them?\n  commands: {', '.join(getattr(command, 'commands', ()))}"
    if kind == "NoSuchOption":
        return _none_of(f"there is no option {error.option_name}", error.option_name, _options(command), "options")
    if kind == "NoSuchCommand" or "o such command" in said:
        name = _named(said)
        return _none_of(f"there is no command {name!r}", name, getattr(command, "commands", ()), "commands")
    if kind == "BadOptionUsage":
        if "does not take" in said:
            return f"{error.option_name} takes no value\n  write  {error.option_name}  alone, or leave it out"
        return f"{error.option_name} needs a value behind it\n  write  {error.option_name} VALUE, or leave it out"
    if kind == "MissingParameter" or "issing" in said:
        return f"{_parameter(error.param)} is missing"
    if getattr(error, "param", None) is not None:
        return _bad_value(error.param, command, typed)
    extra = re.search(r"\(([^()]*)\)$", said)
    return f"nothing is done with {extra[1]!r}: it is one argument too many" if extra else "that cannot be understood"


def _none_of(what: str, name: str, allowed: Iterable[str], plural: str) -> str:
    names = list(allowed)
    bare = {one.lstrip("-"): one for one in names}
    near = bare.get(nearest(name.lstrip("-"), bare), "")
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{what}{hint}" + (f"\n  {plural}: {', '.join(names)}" if names else "")


def _named(said: str) -> str:
    found = re.search(r"'([^']*)'", said)
    return found[1] if found else ""


def _options(command: Any) -> list[str]:
    """Every option of a command as it is typed, those that switch off too."""
    params = getattr(command, "params", ())
    return [
        name for one in params for name in (*one.opts, *getattr(one, "secondary_opts", ())) if name.startswith("--")
    ]


def _parameter(param: Any) -> str:
    """'--bad', or the name of an argument as the usage line writes it."""
    return next((name for name in param.opts if name.startswith("--")), f"the argument {param.name.upper()}")


def _bad_value(param: Any, command: Any, typed: Sequence[str]) -> str:
    option = _parameter(param)
    value = _value(option, typed)
    said = f"{option} {value}" if value else option
    return f"{said}: not what it takes\n  allowed: {_taken(command, param.name)}"


def _value(option: str, typed: Sequence[str]) -> str:
    """What stands behind an option that was typed."""
    for at, part in enumerate(typed):
        if part == option:
            return typed[at + 1] if at + 1 < len(typed) else ""
        if part.startswith(f"{option}="):
            return part.partition("=")[2]
    return ""


def _taken(command: Any, name: str) -> str:
    """What a parameter takes, in words, with its bounds if it has any: from the command's own signature."""
    try:
        annotation = inspect.signature(command.callback, eval_str=True).parameters[name].annotation
    except (TypeError, ValueError, KeyError, NameError, AttributeError):
        return "see its help"
    types = {*_leaves(annotation)}
    words = next((words for kind, words in KINDS.items() if kind in types), "see its help")
    told = next((one for one in getattr(annotation, "__metadata__", ()) if hasattr(one, "min")), None)
    if told is None or told.min is None:
        return words
    return f"{words}, {told.min} or more" if told.max is None else f"{words} from {told.min} to {told.max}"


def _leaves(annotation: object) -> list[object]:
    parts = typing.get_args(annotation)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [annotation]
