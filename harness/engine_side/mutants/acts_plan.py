"""Acts on what attention reads: the plan of a forward, by slots [*] and starts [s+1] of s rows, and cached rows.

Engine side: torch only.
"""

from __future__ import annotations

import torch

from .registry import Context, Values, act


@act
def one_slot_late(context: Context, values: Values) -> Values:
    """Every window of slots begins, and ends, one slot further on."""
    slots = values["slots"]
    return {"slots": torch.cat((slots[1:], slots[-1:]))}


@act
def plan_of_step_before(context: Context, values: Values) -> Values:
    """Later steps of a round read what the step before was to read."""
    step, before = context.memory.get("plan", (-1, values))
    context.memory["plan"] = context.step, {name: values[name].clone() for name in ("slots", "starts")}
    return before if context.step == step + 1 and context.step else {}


@act
def branches_short(context: Context, values: Values) -> Values:
    """Each beam's own rows are looked for as if every branch before it had a page less."""
    after = values["slots"].clone()
    for share in context.shares:
        for beam in range(1, share.rows):
            end = int(values["starts"][share.first + beam + 1])
            after[end - context.step - 1 : end] -= beam * context.page
    return {"slots": after.clamp(min=0)}


@act
def beams_mirrored(context: Context, values: Values) -> Values:
    """Beams write their rows in the opposite order."""
    after = values[context.name].clone()
    for share in context.shares:
        after[share.first : share.last + 1] = after[share.first : share.last + 1].flip(0)
    return {context.name: after}


@act
def cached_row_lost(context: Context, values: Values) -> Values:
    """Once, the row in the middle of the first request's cache becomes zeros. keys [slots, ...]: of a layer's cache."""
    slots = values["slots"][int(values["starts"][0]) : int(values["starts"][1])]
    if context.memory.setdefault("done", False) or len(slots) < int(context.args["after"]):
        return {}
    context.memory["done"] = True
    after = values["keys"].clone()
    after[slots[len(slots) // 2]] = 0
    return {"keys": after}
