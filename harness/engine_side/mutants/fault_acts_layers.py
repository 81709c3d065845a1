"""What mutants change between the layers of a multi-layer MTP draft. `Scene.step` is the layer.

Engine side: torch only.
"""

from __future__ import annotations

from .fault_acts import ACTS, Scene, Values, act


@act
def unrotated(scene: Scene, values: Values) -> Values:
    """Every layer reads what the first one read."""
    if scene.step == 0:
        scene.memory["first"] = values["input_ids"].clone()
        return {}
    return {"input_ids": scene.memory["first"]}


@act
def tail_kept(scene: Scene, values: Values) -> Values:
    """The last row's token is not replaced by what the layer before proposed."""
    before, ids = scene.memory.get("before"), values["input_ids"]
    scene.memory["before"] = ids.clone()
    if scene.step == 0 or before is None:
        return {}
    after, rows = ids.clone(), [share.last for share in scene.shares]
    after[rows] = before[rows]
    return {"input_ids": after}


@act
def deep_state_of_previous_row(scene: Scene, values: Values) -> Values:
    """Layers behind the first one read each row's state from the row before."""
    return ACTS["previous_row"](scene, values) if scene.step else {}


@act
def layers_exchanged(scene: Scene, values: Values) -> Values:
    """The first two layers' proposals change places."""
    ids = values["ids"]
    if ids.shape[1] < 2:
        return {}
    order = [1, 0, *range(2, ids.shape[1])]
    return {"ids": ids[:, order]}
