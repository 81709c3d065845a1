"""Errors that a user can correct, and "did you mean". It must not print anything."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import ClassVar

#: Names less alike than this (difflib's ratio) are not suggested: 'kk' is a mistyped 'k' (0.67), and 'pr9' is no
#: mistyped 'pr26329' (0.6).
ALIKE = 0.65
#: What a finding is called.
FINDING = re.compile(r"F-\d+")
#: Other words for a name, that are spelled like a third.
SAME = {"gpu": "cuda"}


class UserError(Exception):
    """Reported as one message without a traceback; the text says what is wrong, what is allowed, what to type next.

    exit_code: what the command ends with, 2 for something that was typed, 3 for something the machine lacks.
    """

    exit_code: ClassVar[int] = 2


class UsageError(UserError):
    """Something on the command line cannot be."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that `name` may be a slip for, or the number of; empty if there is none.

    Of findings, which are numbered on, it is the one of the same number: that has no neighbours.
    """
    known = list(names)
    if all(FINDING.fullmatch(one) for one in known):
        number = re.search(r"\d+", name)
        return next((one for one in known if number is not None and int(one[2:]) == int(number[0])), "")
    if (same := SAME.get(name.lower())) in known:
        return str(same)
    numbered = [one for one in known if name.isdecimal() and re.fullmatch(rf"\D*0*{name.lstrip('0')}", one)]
    return next(iter(numbered or difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)), "")


def meant(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: a question that names the nearest, empty if none is near."""
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """The text for a name that is none of the allowed ones, with the nearest."""
    names = list(allowed)
    if not names:
        return f"unknown {what} {name!r}: there is none"
    if "," in name and {*name.split(",")} <= {*names}:
        return f"{what} {name!r}: several in one word\n  name them one by one, the option before each"
    return f"unknown {what} {name!r}{meant(name, names)}\n  allowed: {', '.join(names)}"
