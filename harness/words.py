"""Counts in sentences. It must not know what is counted."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """'1 scenario', '2 scenarios': nouns whose plural is an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
