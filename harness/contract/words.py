"""Formats counts and long reasons for sentences. It must not know what is counted."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """'1 scenario', '2 scenarios'. plural: of a noun whose plural is not an s more."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def some(names: Sequence[str], most: int) -> str:
    """'a, b and 3 more' of five names where two are shown at the most."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def percent(part: float, whole: float, digits: int = 0) -> str:
    """'50 %' of 1 and 2; '-' where the whole is nothing."""
    return f"{100 * part / whole:.{digits}f} %" if whole else "-"


def brief(reason: str) -> str:
    """One line of a reason of several: the first, and where that only announces the end of a log, its last line too."""
    first, *more = reason.splitlines() or [""]
    return f"{first} {more[-1].strip()}" if more and first.endswith(":") else first
