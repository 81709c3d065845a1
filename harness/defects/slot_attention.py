"""F-003: a draft beam attends to the cache of its own slot, not to that of the beams it grew from.

The cache is not moved along with the beams: from the second step on, beam s reads the rows that beams of number s
wrote at earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.departures import Departure


class SlotAttention(Departure):
    def attends(self, step: int, parents: Sequence[int]) -> Sequence[int]:
        return range(len(parents)) if step else parents
