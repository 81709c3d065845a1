"""Mutants of a release's own Python: which there could be, and some of them drawn by a seed.

It must not run anything; what ran, and which scenarios ran it, is given (see `harness.search.executed`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from harness.both_sides.codes import placed
from harness.search.mutant_results import Asked, applied
from harness.search.operators import Change, Lines, Ran, changes


def draw(package: Path, ran: Ran, *, count: int, seed: int, captured: bool = False) -> list[Asked]:
    """So many at most, one a line at most: packages take turns, and in one lines, operators and places are equal.

    captured: `ran` is what ran while CUDA graphs were captured.
    """
    chance = random.Random(f"mutate {seed}")
    lines = _in_turn(sorted((file, line) for file, found in ran.items() for line in found), chance)
    sources = {file: (package / file).read_text() for file in ran}
    made: dict[str, dict[int, dict[str, list[Asked]]]] = {}
    drawn: list[Asked] = []
    for file, line in lines:
        if len(drawn) == count:
            break
        if file not in made:
            made[file] = _by_place(file, sources[file], ran[file], captured=captured)
        choices = made[file].get(line, {})
        operators = sorted(choices)
        chance.shuffle(operators)
        found = next((one for name in operators for one in _tried(choices[name], sources[file], chance)), None)
        drawn += [found] if found is not None else []
    return drawn


def asked(file: str, change: Change, *, captured: bool = False) -> Asked:
    """Its name is the same for the same change of the same source."""
    digest = hashlib.sha256(f"{file} {change.start} {change.end} {change.after}".encode()).hexdigest()[:6]
    before, after = (" ".join(text.split()) for text in (change.before, change.after))
    return Asked(
        id=f"{Path(file).stem}-{change.line}-{digest}",
        file=file,
        line=change.line,
        function=change.function,
        operator=change.operator,
        what=f"{before} -> {after}",
        start=change.start,
        end=change.end,
        after=change.after,
        captured=captured,
    )


def _in_turn(lines: list[tuple[str, int]], chance: random.Random) -> list[tuple[str, int]]:
    """Shuffled, a line of each package (speculative, managers, …) after the other, as long as it has any."""
    chance.shuffle(lines)
    packages: dict[str, list[tuple[str, int]]] = {}
    for file, line in lines:
        packages.setdefault(file.split("/")[1], []).append((file, line))
    turns = zip_longest(*(packages[name] for name in sorted(packages)))
    return [one for turn in turns for one in turn if one is not None]


def _by_place(file: str, source: str, lines: Lines, *, captured: bool) -> dict[int, dict[str, list[Asked]]]:
    """line -> operator -> faults."""
    found: dict[int, dict[str, list[Asked]]] = {}
    for change in changes(source, lines):
        found.setdefault(change.line, {}).setdefault(change.operator, []).append(asked(file, change, captured=captured))
    return found


def _tried(faults: list[Asked], source: str, chance: random.Random) -> Iterator[Asked]:
    """Those that compile to something else, in functions that can be given other code, in an order of chance."""
    for one in chance.sample(faults, len(faults)):
        if placed(source, applied(source, [one])):
            yield one
