"""Names for the situations that bugs hide in, each with a predicate that finds where a trace shows it.

The generator asks for situations by name (`Scenario.wants`), the verdict counts them on the engine trace: a situation
that was asked for and never happened makes the verdict UNKNOWN. This module must not judge rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cases import situations_decode, situations_leaving, situations_prefill
from cases.situation_words import SITUATIONS, Place, Situation
from cases.situations_decode import LONGEST_ACCEPT
from harness.batches import Part
from harness.trace import Trace
from harness.types import Scenario

__all__ = ["SITUATIONS", "Reach", "ReachTable", "Situation", "coverage", "positions_inside"]

#: The rooms they are defined in; importing them fills the register.
ROOMS = (situations_prefill, situations_decode, situations_leaving)

#: No engine that speculates and runs alone can show these: mixed chunks are switched off by SGLang itself, the others
#: need several ranks or a decode side of its own.
ELSEWHERE = ("mixed_batch", "empty_batch", "idle_rank")


def coverage(scenario: Scenario, trace: Trace) -> dict[str, int]:
    """Situation -> times it happened; accept lengths beyond k+1 are left out."""
    return {found.name: found.count(scenario, trace) for found in _applicable(scenario)}


def positions_inside(scenario: Scenario, trace: Trace) -> dict[str, int]:
    """Situation -> rows with a position in the batches, or parts of batches, where it happened; each row once."""
    inside = {}
    for found in _applicable(scenario):
        rows = np.zeros(len(trace.rows), dtype=bool)
        for place in found.find(scenario, trace):
            rows |= _rows_of(place, trace)
        inside[found.name] = int(rows.sum())
    return inside


def _applicable(scenario: Scenario) -> list[Situation]:
    beyond = {f"accept_len_{length}" for length in range(scenario.spec.k + 2, LONGEST_ACCEPT + 1)}
    return [found for name, found in SITUATIONS.items() if name not in beyond]


def _rows_of(place: Place, trace: Trace) -> np.ndarray:
    """bool [R]: the rows that lie in a place."""
    ints = trace.rows.ints
    if place is None:
        return np.zeros(len(trace.rows), dtype=bool)
    record = place.record if isinstance(place, Part) else place
    inside = (ints["position"] >= 0) & (ints["round"] == record.index) & (ints["dp_rank"] == record.dp_rank)
    return inside & (trace.rows.strings["rid"] == place.rid) if isinstance(place, Part) else inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One line of a run's situation table.

    generated: scenarios that asked for it; reached: those of them where it happened; seen: all scenarios where it
    happened; times: how often in all; positions: rows compared inside it.
    """

    name: str
    generated: int = 0
    reached: int = 0
    seen: int = 0
    times: int = 0
    positions: int = 0


@dataclass(slots=True)
class ReachTable:
    """The situation table of a run, filled scenario by scenario so that no trace need be kept."""

    lines: dict[str, Reach] = field(default_factory=lambda: {name: Reach(name=name) for name in SITUATIONS})

    def add(self, scenario: Scenario, trace: Trace) -> None:
        inside = positions_inside(scenario, trace)
        for name, times in coverage(scenario, trace).items():
            line, wanted = self.lines[name], name in scenario.wants
            self.lines[name] = Reach(
                name=name,
                generated=line.generated + wanted,
                reached=line.reached + (wanted and times > 0),
                seen=line.seen + (times > 0),
                times=line.times + times,
                positions=line.positions + inside[name],
            )
