"""F-037: penalties count one token a round.

Before each verify the last token that the scheduler has is counted, which is the tree's root, and under overlap the
root of the round before, or the prompt's last token; what else a round accepted never is, nor the path that leads to a
node, nor what was generated before a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.departures import Departure


class CountsRoots(Departure):
    def counts(self, generated: Sequence[int], *, known: Sequence[int], last: int) -> Sequence[int]:
        return [generated[count - 1] if count else last for count in known]
