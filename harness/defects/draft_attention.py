"""F-003 and F-114: what draft steps of a round attend to of it.

F-003: a draft beam attends to the cache of its own slot, not to that of the beams it grew from. The cache is not moved
along with the beams: from the second step on, beam s reads the rows that beams of number s wrote at earlier steps.

F-114: with a sparse indexer draft steps attend committed rows alone, neither themselves nor the steps before.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.departures import Departure


class SlotAttention(Departure):
    def attends(self, step: int, parents: Sequence[int]) -> Sequence[int]:
        return range(len(parents)) if step else parents


class UnseenRound(Departure):
    """Of every EAGLE draft step."""

    def sees_round(self) -> bool:
        return False
