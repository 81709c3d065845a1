"""What is said to a caller who asked for something that cannot be. It must not print or end anything."""

from __future__ import annotations

from collections.abc import Iterable

from harness.contract.words import meant


class UsageError(Exception):
    """Something the caller asked for cannot be; the text names it, what is allowed and what to type."""


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """The text for a name that is none of the allowed ones, with the nearest."""
    names = list(allowed)
    return f"unknown {what} {name!r}{meant(name, names)}\n  allowed: {', '.join(names)}"
