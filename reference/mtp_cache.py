"""What a prefix cache holds of MTP layers: rows that were written for another text behind them.

Layer i reads the token i + 1 places behind a row, so what it leaves there fits only requests that agree that far. A
cache that hands a row to every request that agrees in the row and the next token (docs/findings/F-012.md) hands deep
layers rows of another text. Here the rows' owners are followed through time, by tokens alone. This module must not run
a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from reference.mtp import Window

#: What the k layers read at one row.
Read = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Owner:
    """One request between two restarts. text: prompt and all it committed. held: what its rows hold now, by row.

    asked: how many tokens it began with. stays: whether its rows go into the cache when it ends (those of a retracted
    request do not).
    """

    text: Sequence[int]
    asked: int
    stays: bool = True
    held: list[Read] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A window of an owner in a round, in the order of the batch. prompt: of its prompt; final: its last chunk.

    read: what the layers read at the window's rows. first, last: of the owner's windows.
    """

    owner: Owner
    round: int
    window: Window
    read: Sequence[Read]
    prompt: bool
    final: bool
    first: bool
    last: bool


def held_rows(steps: Iterable[Step]) -> list[tuple[Read, ...]]:
    """What the rows before each step's window hold when it runs, in the order of `steps` (by round, then by batch)."""
    tree: dict[tuple[int, ...], Read] = {}
    found = []
    for _, batch in groupby(steps, key=lambda step: step.round):
        together = list(batch)
        for step in together:
            if step.first:
                _enter(tree, step)
            found.append(tuple(step.owner.held[: step.window.start]))
            step.owner.held[step.window.start :] = step.read
        for step in sorted(together, key=lambda step: not step.final):  # a request in mid-prompt is cached last
            if step.prompt:
                _share(tree, step.owner, step.window.stop, takes=True)
            if step.last and step.owner.stays:
                _share(tree, step.owner, step.window.stop, takes=False)
    return found


def _enter(tree: dict[tuple[int, ...], Read], step: Step) -> None:
    """The rows a request begins with are the cache's; what it did not get, though it fits, is no longer there.

    A request never gets its last row, and the one before has no token behind it among those that are looked for.
    """
    text, start = step.owner.text, step.window.start
    step.owner.held = [tree.get(_key(text, row), ()) for row in range(start)]
    if start < step.owner.asked - 2 and _key(text, start) in tree:
        for row in range(start, len(text) - 1):
            tree.pop(_key(text, row), None)


def _share(tree: dict[tuple[int, ...], Read], owner: Owner, stop: int, *, takes: bool) -> None:
    """Rows 0..stop-2 go into the cache, unless they are there: then the owner takes (or frees) its own for those."""
    for row in range(stop - 1):
        kept = tree.setdefault(_key(owner.text, row), owner.held[row])
        if takes:
            owner.held[row] = kept


def _key(text: Sequence[int], row: int) -> tuple[int, ...]:
    """What a request must agree in to be given a row: all up to it, and the token behind."""
    return tuple(text[: row + 2])
