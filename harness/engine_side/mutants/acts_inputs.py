"""Acts on what goes into a forward, row by row, and on what is chosen from what comes out.

Engine side: torch only. A change is made on copies: the engine computes on with what an act returns, and the probe
records it.

Symbols: rows of a request are found through `Scene.shares`; h is the width of a state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .registry import Scene, Share, Values, act


def _moved(scene: Scene, values: Values, source: Callable[[Share, int], int]) -> Values:
    """The field with each row the mutant is about taken from row `source(share, row)`."""
    before = values[scene.name]
    after, rows = before.clone(), set(scene.rows())
    for share in scene.shares:
        for row in range(share.first, share.last + 1):
            if row in rows:
                after[row] = before[source(share, row)]
    return {scene.name: after}


@act
def add(scene: Scene, values: Values) -> Values:
    after = values[scene.name].clone()
    for row in scene.rows():  # a list of rows would have to reach the device, which a graph's capture forbids
        after[row] += int(scene.args["by"])
    return {scene.name: after}


@act
def next_page(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name] + scene.page}


@act
def zero(scene: Scene, values: Values) -> Values:
    after = values[scene.name].clone()
    for row in scene.rows():
        after[row] = 0
    return {scene.name: after}


@act
def previous_row(scene: Scene, values: Values) -> Values:
    return _moved(scene, values, lambda share, row: max(row - 1, share.first))


@act
def next_row(scene: Scene, values: Values) -> Values:
    return _moved(scene, values, lambda share, row: min(row + 1, share.last))


@act
def first_row(scene: Scene, values: Values) -> Values:
    return _moved(scene, values, lambda share, row: share.first)


@act
def neighbour(scene: Scene, values: Values) -> Values:
    """From the next request of the batch: row by row, or tail from tail where only last rows are meant."""
    partner = {share.rid: other for share, other in zip(scene.shares, scene.shares[1:] + scene.shares[:1], strict=True)}

    def source(share: Share, row: int) -> int:
        other = partner[share.rid]
        from_start = other.first + min(row - share.first, other.rows - 1)
        return other.last if scene.args.get("at") == "last" else from_start

    return _moved(scene, values, source)


@act
def frozen(scene: Scene, values: Values) -> Values:
    """Every later step of a round, or layer, gets what the first one had."""
    step, first = scene.memory.get("first", (scene.step, None))
    if scene.step <= step:
        scene.memory["first"] = scene.step, values[scene.name].clone()
        return {}
    return {scene.name: first.clone()}


@act
def restart(scene: Scene, values: Values) -> Values:
    after = values[scene.name].clone()
    for share in scene.shares:
        after[share.first : share.last + 1] -= share.start
    return {scene.name: after}


@act
def target_guess(scene: Scene, values: Values) -> Values:
    after, rows = values[scene.name].clone(), set(scene.rows())
    for number, share in enumerate(scene.shares):
        if share.last in rows and scene.guesses is not None:
            after[share.last] = scene.guesses[number]
    return {scene.name: after}


@act
def from_before(scene: Scene, values: Values) -> Values:
    """The first step of a round gets what the request had there one round earlier."""
    if scene.step > 0:
        return {}
    before, after = values[scene.name], values[scene.name].clone()
    for share in scene.shares:
        old = scene.memory.get(share.rid)
        scene.memory[share.rid] = before[share.first : share.last + 1].clone()
        if old is not None:
            after[share.first : share.last + 1] = old
    return {scene.name: after}


@act
def narrow(scene: Scene, values: Values) -> Values:
    """As wide as one of `parts`, two if nothing is said."""
    value = values[scene.name]
    return {scene.name: value[:, : value.shape[1] // int(scene.args.get("parts", 2))].contiguous()}


@act
def coarse(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name].to(torch.bfloat16)}


@act
def second_best(scene: Scene, values: Values) -> Values:
    """Each row's choices without the best one."""
    ids = values[scene.name]
    if scene.logits is None or scene.logits.shape[0] != ids.shape[0]:
        return {}
    runners_up = scene.logits.topk(ids.shape[-1] + 1, dim=-1).indices[:, 1:]
    return {scene.name: runners_up.to(ids.dtype)}


# -- what any value may become, where the site has it --


@act
def become(scene: Scene, values: Values) -> Values:
    """The `value` everywhere. of: "draft" where only drafts are meant."""
    if scene.name not in values or (scene.args.get("of") == "draft" and not values["draft"]):
        return {}
    return {scene.name: torch.full_like(values[scene.name], scene.args["value"])}


@act
def moved(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name] + int(scene.args["by"])}


@act
def of_neighbour(scene: Scene, values: Values) -> Values:
    """Each request has what the next one should have; with `by` 1, the one before."""
    names = [name for name in scene.name.split() if name in values]
    return {name: values[name].roll(int(scene.args.get("by", -1)), 0) for name in names}


@act
def mirrored(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name].flip(-1)} if scene.name in values else {}


@act
def without_last(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name][:-1]}


@act
def last_again(scene: Scene, values: Values) -> Values:
    value = values[scene.name]
    return {scene.name: torch.cat((value, value[-1:]))}


@act
def squared(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name] ** 2} if scene.name in values else {}


# -- features and vocabulary of an EAGLE-3 head; the features of a row lie side by side, `parts` of one width --


def _parts(scene: Scene, values: Values) -> tuple[torch.Tensor, ...]:
    """[rows, h] each; one whole part where the rows do not hold `parts` features."""
    value, parts = values[scene.name], int(scene.args["parts"])
    return value.chunk(parts, dim=-1) if value.shape[-1] % parts == 0 else (value,)


@act
def features_rolled(scene: Scene, values: Values) -> Values:
    """The last layer's feature comes first."""
    parts = _parts(scene, values)
    return {scene.name: torch.cat((parts[-1], *parts[:-1]), dim=-1)}


@act
def feature_repeated(scene: Scene, values: Values) -> Values:
    """The feature of the layer below stands in the place of the highest one."""
    parts = _parts(scene, values)
    return {scene.name: torch.cat((*parts[:-1], parts[-2]), dim=-1)}


@act
def feature_missing(scene: Scene, values: Values) -> Values:
    """The rows are narrower by one feature."""
    return {scene.name: torch.cat(_parts(scene, values)[:-1], dim=-1)}


@act
def one_feature(scene: Scene, values: Values) -> Values:
    """The highest feature alone, as wide as a draft row, so that nothing widens it: fc is skipped."""
    return {scene.name: _parts(scene, values)[-1].contiguous()}


@act
def map_twice(scene: Scene, values: Values) -> Values:
    """Offsets added twice, as far as the vocabulary goes."""
    ids = values["map"]
    own = torch.arange(len(ids), dtype=ids.dtype, device=ids.device)
    return {"map": (2 * ids - own).minimum(ids.max())}


@act
def map_left_out(scene: Scene, values: Values) -> Values:
    """Draft ids are taken for target ids."""
    ids = values["map"]
    return {"map": torch.arange(len(ids), dtype=ids.dtype, device=ids.device)}


# -- between the layers of a multi-layer MTP draft; `Scene.step` is the layer --


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
    return previous_row(scene, values) if scene.step else {}


@act
def state_of_layer_before_last(scene: Scene, values: Values) -> Values:
    """From the third layer on, each reads what the layer before it read, not what that one said."""
    before, scene.memory["read"] = scene.memory.get("read"), values["hidden"].clone()
    return {} if scene.step < 2 or before is None else {"hidden": before}


@act
def layers_exchanged(scene: Scene, values: Values) -> Values:
    """The first two layers' proposals change places."""
    ids = values["ids"]
    if ids.shape[1] < 2:
        return {}
    return {"ids": ids[:, [1, 0, *range(2, ids.shape[1])]]}


# -- what TP ranks exchange --


@act
def left_out(scene: Scene, values: Values) -> Values:
    """A rank goes on with its own part in the place of the sum."""
    return {"sum": values["part"]}


@act
def shards_swapped(scene: Scene, values: Values) -> Values:
    """The shards of the last dimension lie in the opposite order."""
    whole, width = values["whole"], values["part"].shape[-1]
    return {"whole": torch.cat(whole.split(width, dim=-1)[::-1], dim=-1)}


@act
def of_target(scene: Scene, values: Values) -> Values:
    return {"own": values["target"]}
