"""Names for the situations that bugs hide in, each with a predicate that finds where a trace shows it.

The generator asks for situations by name (`Scenario.wants`), the verdict counts them on the engine trace: a situation
that was asked for and never happened makes the verdict UNKNOWN. This module must not judge rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cases import situations_decode, situations_handoff, situations_leaving, situations_prefill, situations_ranks
from cases.situation_words import SITUATIONS, Place, Situation
from cases.situations_decode import LONGEST_ACCEPT
from harness.contract.batches import Part
from harness.contract.trace import Trace
from harness.contract.types import Scenario, Verdict

__all__ = ["SITUATIONS", "Reach", "ReachTable", "Situation", "count", "reach_of"]

#: The rooms they are defined in; importing them fills the register.
ROOMS = (situations_prefill, situations_decode, situations_leaving, situations_ranks, situations_handoff)

#: No engine that speculates and runs alone can show these: mixed chunks are switched off by SGLang itself, the others
#: need several ranks or a decode side of its own.
ELSEWHERE = (
    "mixed_batch",
    "empty_batch",
    *situations_ranks.NAMES,
    *situations_ranks.MANY,
    *situations_handoff.NAMES,
)


def count(scenario: Scenario, trace: Trace) -> tuple[dict[str, int], dict[str, int]]:
    """(situation -> times it happened, situation -> positions where it did); accept lengths beyond k+1 are left out.

    A position is a row that has one, in the batches, or parts of batches, where it happened; each row once.
    """
    times, inside = {}, {}
    for found in _applicable(scenario):
        rows, places = np.zeros(len(trace.rows), dtype=bool), 0
        for place in found.find(scenario, trace):
            rows |= _rows_of(place, trace)
            places += 1
        times[found.name], inside[found.name] = places, int(rows.sum())
    return times, inside


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

    def add(self, scenario: Scenario, verdict: Verdict) -> None:
        """Count what the verdict on one scenario says of situations."""
        for name, times in verdict.coverage.items():
            line, wanted = self.lines.get(name, Reach(name=name)), name in scenario.wants
            self.lines[name] = Reach(
                name=name,
                generated=line.generated + wanted,
                reached=line.reached + (wanted and times > 0),
                seen=line.seen + (times > 0),
                times=line.times + times,
                positions=line.positions + verdict.inside.get(name, 0),
            )


def reach_of(judged: Iterable[tuple[Scenario, Verdict]]) -> list[Reach]:
    """The lines of a run that say anything: asked for, or seen."""
    table = ReachTable()
    for scenario, verdict in judged:
        table.add(scenario, verdict)
    return [line for line in table.lines.values() if line.generated or line.seen]
