"""Counts in sentences, and what somebody may have meant. It must not know what is counted or named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Names less alike than this (difflib's ratio) are no slips of the same hand: 'kk' is a mistyped 'k' (0.67), and 'pr9'
#: is no mistyped 'pr26329' (0.6).
ALIKE = 0.65


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that `name` may be a slip for; empty if there is none."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=ALIKE)), "")


def meant(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: a question that names the nearest, empty if none is near."""
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""


def counted(number: int, noun: str) -> str:
    """'1 scenario', '2 scenarios': nouns whose plural is an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def brief(reason: str) -> str:
    """One line of a reason of several: the first, and where that only announces the end of a log, its last line too."""
    first, *more = reason.splitlines() or [""]
    return f"{first} {more[-1].strip()}" if more and first.endswith(":") else first
