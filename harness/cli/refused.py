"""What the parser of the command line refuses, in our words: what is wrong, what is allowed, what to type next.

It must not judge values itself, and must not end a command.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from harness.cli.options import SETTINGS, allowed_of
from harness.contract.allowed import scalar
from harness.contract.usage import meant, unknown

#: Whatever the parser refuses: the base of this class, which typer itself does not export.
Refusal: type[Exception] = typer.BadParameter.__mro__[1]
#: What a refusal of a word that stands where none may be names: a command in quotes, or arguments in brackets.
NAMED = re.compile(r"'[^']*'|\([^()]*\)$")
NUMBERS = {int: "integer", float: "number"}


def in_words(error: Any, ctx: Any, typed: Sequence[str]) -> str:
    """The text of a refusal. ctx: the context of the command, where the error has none; typed: all arguments."""
    ctx = error.ctx or ctx
    more = f"\n  more:  {ctx.command_path} --help"
    param, kind = getattr(error, "param", None), type(error).__name__
    if kind == "NoSuchOption":
        known = [name for one in ctx.command.get_params(ctx) for name in _names(one)]
        return f"no option {error.option_name!r}{meant(error.option_name, known)}{more}"
    if kind == "BadOptionUsage":
        return _of_a_value(error.option_name, ctx, more, switch="does not take" in error.message)
    if kind == "MissingParameter" and param is not None:
        return f"{_shown(param)} is missing: {lowered(param.help)}{more}"
    if kind == "BadParameter" and param is not None:
        return _of_a_parameter(param, ctx, typed) or f"{_shown(param)}: {error.message}{more}"
    named = NAMED.search(error.message)
    if named and (commands := getattr(ctx.command, "commands", None)):
        return unknown("command", named[0].strip("'()"), commands)
    return f"{named[0].strip('()')!r} is one argument too many{more}" if named else f"{error.message}{more}"


def _of_a_value(name: str, ctx: Any, more: str, *, switch: bool) -> str:
    """An option without the value that it takes, or a switch with one."""
    if switch:
        return f"{name} is a switch and takes no value\n  type:  {name}"
    param = next((one for one in ctx.command.get_params(ctx) if name in one.opts), None)
    allowed = "" if param is None else allowed_at(ctx.command, param)
    return f"{name} needs a value" + (f"\n  allowed: {allowed}" if allowed else more)


def _of_a_parameter(param: Any, ctx: Any, typed: Sequence[str]) -> str:
    """A value of a kind, or outside a range, that the parameter does not take; empty where its range is not known."""
    allowed = allowed_at(ctx.command, param)
    name, value = _typed_for(param, typed)
    return f"{name} {value} cannot be{meant(value, allowed.split(', '))}\n  allowed: {allowed}" if allowed else ""


def _typed_for(param: Any, typed: Sequence[str]) -> tuple[str, str]:
    """The name by which an option was typed, and its value; empty for an argument."""
    for one, after in pairwise([*typed, ""]):
        name, equals, value = one.partition("=")
        if name in _names(param):
            return name, value if equals else after
    return "", ""


def _names(param: Any) -> tuple[str, ...]:
    return (*param.opts, *param.secondary_opts)


def _shown(param: Any) -> str:
    """A parameter as its help calls it."""
    return str(param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper())


def lowered(text: str) -> str:
    """A help text as the end of a sentence."""
    return f"{text[:1].lower()}{text[1:].removesuffix('.')}"


def allowed_at(command: Any, param: Any) -> str:
    """What a command's parameter takes, in words; empty where anything goes."""
    if param.name in SETTINGS:
        return allowed_of(param.name)
    found = inspect.signature(command.callback, eval_str=True).parameters[param.name].annotation
    return _allowed(*get_args(found)) if get_origin(found) is Annotated else ""


def _allowed(kind: Any, info: Any) -> str:
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for one in kinds:
        if get_origin(one) is Literal:
            return ", ".join(get_args(one))
        if one in NUMBERS:
            limits = {"minimum": info.min, "maximum": info.max}
            said = {name: limit for name, limit in limits.items() if limit is not None}
            return scalar({"type": NUMBERS[one], **said})
    return ""
