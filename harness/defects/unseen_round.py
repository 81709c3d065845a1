"""F-114: with a sparse indexer draft steps attend committed rows alone, neither themselves nor the steps before."""

from __future__ import annotations

from reference.departures import Departure


class UnseenRound(Departure):
    """Of every EAGLE draft step."""

    def sees_round(self) -> bool:
        return False
