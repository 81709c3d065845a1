"""What mutants change in a sampled verify: its coins, and the law that they draw from.

Engine side: torch only. nodes [b,n] and final [b] are coins, law [b,n,V] the target's probabilities after each node.
"""

from __future__ import annotations

from .fault_acts import Scene, Values, act


@act
def coins_of_neighbour(scene: Scene, values: Values) -> Values:
    """Each request is decided by the coins of the next one."""
    return {"nodes": values["nodes"].roll(-1, 0), "final": values["final"].roll(-1, 0)}


@act
def coins_halved(scene: Scene, values: Values) -> Values:
    """A child's share of the unit interval counts twice."""
    return {"nodes": values["nodes"] * 0.5}


@act
def law_of_root(scene: Scene, values: Values) -> Values:
    """Everything is drawn from what the target said after the root."""
    return {"law": values["law"][:, :1].expand_as(values["law"]).contiguous()}


@act
def final_mirrored(scene: Scene, values: Values) -> Values:
    """The last token is drawn from the other end of what is left."""
    return {"final": 1.0 - values["final"]}
