"""What the rows of a target and a draft are functions of: a text, and how much of it was only proposed.

Two rows with the same `Meaning` must hold the same values, whatever batch, cache, chunk or slot they were computed in.
This module must not know a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

#: The number of the empty text.
NOTHING = 0


class Meaning(NamedTuple):
    """A row that read the last token of a text, all before it known. text: its number among `Texts`.

    target: the target's row at that token. draft: the draft's row that reads that token beside the target's state one
    before it; the last `drafted` tokens were proposals that draft steps fed, each beside the state that the step before
    left (0: the row that catches up with the target).
    """

    model: Literal["target", "draft"]
    text: int
    drafted: int = 0


class Texts:
    """Token sequences by number: the same sequence has the same number, however it was reached."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._ends: list[tuple[int, int]] = [(NOTHING, -1)]  # number -> (text without its last token, that token)

    def after(self, text: int, token: int) -> int:
        """The text with one more token."""
        number = self._numbers.setdefault((text, token), len(self._ends))
        if number == len(self._ends):
            self._ends.append((text, token))
        return number

    def along(self, tokens: Sequence[int], text: int = NOTHING) -> list[int]:
        """The text, and the text behind each of n more tokens, [n + 1]."""
        found = [text]
        for token in tokens:
            found.append(self.after(found[-1], token))
        return found

    def without(self, text: int, count: int = 1) -> int:
        """The text without its last tokens."""
        for _ in range(count):
            text = self._ends[text][0]
        return text

    def tokens(self, text: int) -> tuple[int, ...]:
        """The tokens of a text."""
        found = []
        while text != NOTHING:
            text, token = self._ends[text]
            found.append(token)
        return tuple(reversed(found))
