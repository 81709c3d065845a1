"""Acts on what attention reads: the plan of a forward, by slots [*] and starts [s+1] of s rows, and cached rows.

Engine side: torch only.
"""

from __future__ import annotations

import torch

from .registry import Scene, Values, act


@act
def one_slot_late(scene: Scene, values: Values) -> Values:
    """Every window of slots begins, and ends, one slot further on."""
    slots = values["slots"]
    return {"slots": torch.cat((slots[1:], slots[-1:]))}


@act
def plan_of_step_before(scene: Scene, values: Values) -> Values:
    """Later steps of a round read what the step before was to read."""
    step, before = scene.memory.get("plan", (-1, values))
    scene.memory["plan"] = scene.step, {name: values[name].clone() for name in ("slots", "starts")}
    return before if scene.step == step + 1 and scene.step else {}


@act
def branches_short(scene: Scene, values: Values) -> Values:
    """Each beam's own rows are looked for as if every branch before it had a page less."""
    after = values["slots"].clone()
    for share in scene.shares:
        for beam in range(1, share.rows):
            end = int(values["starts"][share.first + beam + 1])
            after[end - scene.step - 1 : end] -= beam * scene.page
    return {"slots": after.clamp(min=0)}


@act
def beams_mirrored(scene: Scene, values: Values) -> Values:
    """Beams write their rows in the opposite order."""
    after = values[scene.name].clone()
    for share in scene.shares:
        after[share.first : share.last + 1] = after[share.first : share.last + 1].flip(0)
    return {scene.name: after}


@act
def cached_row_lost(scene: Scene, values: Values) -> Values:
    """Once, the row in the middle of the first request's cache becomes zeros. keys [slots, ...]: of a layer's cache."""
    slots = values["slots"][int(values["starts"][0]) : int(values["starts"][1])]
    if scene.memory.setdefault("done", False) or len(slots) < int(scene.args["after"]):
        return {}
    scene.memory["done"] = True
    after = values["keys"].clone()
    after[slots[len(slots) // 2]] = 0
    return {"keys": after}
