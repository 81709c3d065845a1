"""Which cells of a night a process takes next, where several processes drive it side by side.

Pure; it must not drive anything.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from harness.night.cells import Cell

#: Cells with several ranks that run at once: on cards their ranks wait for each other, each for its turn. Six were seen
#: to boot and run side by side on two H200 (docs/evidence/gpu.md).
RANKS_ON_CARDS = 6
#: Cores that a cell with several ranks takes on a CPU: two for each of two ranks.
CORES_OF_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cells of one boot configuration of one release, which share engines; mutants share theirs with nobody."""

    cells: tuple[Cell, ...]

    @property
    def release(self) -> str:
        return self.cells[0].engine

    @property
    def cost(self) -> int:
        """About how many seconds it takes."""
        return sum(cell.cost for cell in self.cells)

    @property
    def ranks(self) -> bool:
        """Whether its engines have several ranks."""
        return any(one.tp_size > 1 for cell in self.cells for one in cell.configs)


def groups(cells: Iterable[Cell]) -> list[Group]:
    """In the order of the cells, as a night in one process would drive those of each."""
    found = dict[tuple[str, str, bool], list[Cell]]()
    for cell in cells:
        found.setdefault((cell.engine, cell.boot_key, cell.mutants is not None), []).append(cell)
    return [Group(cells=tuple(sorted(one, key=lambda cell: cell.assumes))) for one in found.values()]


@dataclass(slots=True, kw_only=True)
class Waiting:
    """Groups that no process has taken. together: how many of those with several ranks may be driven at once."""

    groups: list[Group]
    together: int

    @classmethod
    def of(cls, cells: Sequence[Cell], *, device: str) -> Self:
        on_cpu = max(1, len(os.sched_getaffinity(0)) // CORES_OF_RANKS)
        return cls(groups=groups(cells), together=RANKS_ON_CARDS if device == "cuda" else on_cpu)

    def take(self, *, last: str, busy: Sequence[Group], ahead: bool = False) -> Group | None:
        """The next group for a process; None where there is none that may be driven now.

        last: the release it has imported, empty at first. busy: what all processes have. ahead: it is not done with
        what it has, so nothing with several ranks may boot there.
        """
        ranks = not ahead and sum(group.ranks for group in busy) < self.together
        able = [group for group in self.groups if ranks or not group.ranks]
        if not able:
            return None
        left, there = Counter[str](), Counter(group.release for group in busy)
        for group in self.groups:
            left[group.release] += group.cost

        def worth(group: Group) -> tuple[bool, bool, float, int]:
            """Ranks first, so that they are not left for the end; then what is imported; then where most is left."""
            release = group.release
            return group.ranks, release == last, left[release] / (1 + there[release]), group.cost

        best = max(able, key=worth)
        self.groups.remove(best)
        return best
