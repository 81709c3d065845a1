"""Acts on copies between the device and the host. of: "draft" for pools of drafts alone.

Engine side: torch only.
"""

from __future__ import annotations

from .registry import Context, Values, act


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
