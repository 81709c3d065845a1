"""What mutants change in the KV pool, in who stays in the running batch, and in the limits of requests.

Engine side: torch only.
"""

from __future__ import annotations

import torch

from .fault_acts import Scene, Values, act


@act
def hand_out_again(scene: Scene, values: Values) -> Values:
    """The last slot of every later allocation is the first slot of the scenario's first one."""
    slots = values["slots"]
    if "held" not in scene.memory:
        scene.memory["held"] = slots[:1].clone()
        return {}
    return {"slots": torch.cat((slots[:-1], scene.memory["held"]))}


@act
def shifted(scene: Scene, values: Values) -> Values:
    """Every second allocation."""
    scene.memory["calls"] = scene.memory.get("calls", 0) + 1
    return {"slots": values["slots"] + int(scene.args["by"])} if scene.memory["calls"] % 2 == 0 else {}


@act
def keep_last(scene: Scene, values: Values) -> Values:
    return {"slots": values["slots"][:-1]}


@act
def last_twice(scene: Scene, values: Values) -> Values:
    return {"slots": torch.cat((values["slots"], values["slots"][-1:]))}


@act
def keep_finished(scene: Scene, values: Values) -> Values:
    """Every finished request stays for one batch more; SGLang asks who stays several times between two batches."""
    keep = set(values["keep"].tolist())
    for number in values["finished"].nonzero().flatten().tolist():
        if scene.memory.setdefault(scene.shares[number].rid, scene.batch) == scene.batch:
            keep.add(number)
    return {"keep": torch.tensor(sorted(keep), dtype=torch.int64)}


@act
def drop_live(scene: Scene, values: Values) -> Values:
    """Once, the last of several live requests."""
    if len(values["keep"]) < 2 or scene.memory.setdefault("dropped", False):
        return {}
    scene.memory["dropped"] = True
    return {"keep": values["keep"][:-1]}


@act
def one_token_more(scene: Scene, values: Values) -> Values:
    """Once a request."""
    limits = values["limits"].clone()
    for number, share in enumerate(scene.shares):
        if share.rid not in scene.memory:
            scene.memory[share.rid] = True
            limits[number] += 1
    return {"limits": limits}


@act
def no_stops(scene: Scene, values: Values) -> Values:
    return {"stops": torch.zeros_like(values["stops"])}
