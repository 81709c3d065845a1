"""F-037: penalties count one token a round.

Before each verify the last token committed is counted, which is the tree's root; what else the round before accepted
never is, nor the path that leads to a node, nor what was generated before a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.departures import Departure


class CountsRoots(Departure):
    def counts(self, generated: Sequence[int], *, rounds: Sequence[int]) -> Sequence[int]:
        return [generated[place] for place in rounds]
