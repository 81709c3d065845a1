"""Acts on copies between the device and the host. of: "draft" for pools of drafts alone.

Engine side: torch only.
"""

from __future__ import annotations

from .registry import Scene, Values, act


def _meant(scene: Scene, values: Values) -> bool:
    return scene.args.get("of") != "draft" or bool(values["draft"])


@act
def rows_left_out(scene: Scene, values: Values) -> Values:
    """Nothing is copied; with `rows` "first", all but the first page."""
    if not _meant(scene, values):
        return {}
    start = scene.page if scene.args.get("rows") == "first" else len(values["host"])
    return {name: values[name][start:] for name in ("host", "device") if name in values}


@act
def one_page_off(scene: Scene, values: Values) -> Values:
    """Each page of the host gets the rows of the page before; the first those of the last."""
    return {"host": values["host"].roll(scene.page)} if _meant(scene, values) else {}


@act
def layer_before(scene: Scene, values: Values) -> Values:
    """Each layer loads what the layer before it loads, so that the last one keeps what it had."""
    return {"layer": (values["layer"] - 1).clamp(min=0)} if _meant(scene, values) else {}


@act
def page_before(scene: Scene, values: Values) -> Values:
    """The page of the host that lies before the one that is meant."""
    return {"host": (values["host"] - scene.page).clamp(min=0)} if _meant(scene, values) else {}
