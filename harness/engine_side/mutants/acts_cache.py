"""Acts on cached rows: the plan by which attention reads them, and copies of them between the device and the host.

Engine side: torch only. A plan: slots [*] and starts [s+1] of s rows.
"""

from __future__ import annotations

from .registry import Context, Values, act


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


# -- copies between the device and the host; of: "draft" for pools of drafts alone --


def _meant(context: Context, values: Values) -> bool:
    return context.args.get("of") != "draft" or bool(values["draft"])


@act
def rows_left_out(context: Context, values: Values) -> Values:
    """Nothing is copied; with `rows` "first", all but the first page."""
    if not _meant(context, values):
        return {}
    start = context.page if context.args.get("rows") == "first" else len(values["host"])
    return {name: values[name][start:] for name in ("host", "device") if name in values}


@act
def one_page_off(context: Context, values: Values) -> Values:
    """Each page of the host gets the rows of the page before; the first those of the last."""
    return {"host": values["host"].roll(context.page)} if _meant(context, values) else {}


@act
def layer_before(context: Context, values: Values) -> Values:
    """Each layer loads what the layer before it loads, so that the last one keeps what it had."""
    return {"layer": (values["layer"] - 1).clamp(min=0)} if _meant(context, values) else {}


@act
def page_before(context: Context, values: Values) -> Values:
    """The page of the host that lies before the one that is meant."""
    return {"host": (values["host"] - context.page).clamp(min=0)} if _meant(context, values) else {}
