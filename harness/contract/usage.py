"""What is said to a caller who asked for something that cannot be. It must not print or end anything."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from harness.contract.words import meant


class UsageError(Exception):
    """Something the caller asked for cannot be; the text names it, what is allowed and what to type."""


#: More names than this are not listed; the nearest are.
LISTED = 20


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """The text for a name that is none of the allowed ones, with the nearest."""
    names = list(allowed)
    hint = meant(name, names)
    if len(names) <= LISTED:
        return f"unknown {what} {name!r}{hint}\n  allowed: {', '.join(names)}"
    nearest = difflib.get_close_matches(name, names, n=5, cutoff=0.0)
    return f"unknown {what} {name!r}{hint}\n  allowed, the nearest first: {', '.join(nearest)}, …"
