"""Formats counts and long reasons for sentences. It must not know what is counted."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """'1 scenario', '2 scenarios'. plural: of a noun whose plural is not an s more."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def brief(reason: str) -> str:
    """One line of a reason of several: the first, and where that only announces the end of a log, its last line too."""
    first, *more = reason.splitlines() or [""]
    return f"{first} {more[-1].strip()}" if more and first.endswith(":") else first
