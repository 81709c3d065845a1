"""What mutants change in what an EAGLE-3 head is given: the features of the target's layers, and the vocabulary map.

Engine side: torch only. Features of a row lie side by side, `parts` of them, all of one width.
"""

from __future__ import annotations

import torch

from .fault_acts import Scene, Values, act


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
    """The highest layer was not taken: the one below it stands in its place."""
    parts = _parts(scene, values)
    return {scene.name: torch.cat((*parts[:-1], parts[-2]), dim=-1)}


@act
def feature_missing(scene: Scene, values: Values) -> Values:
    """One feature short: the rows are narrower by a part."""
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
    return {"map": (2 * ids - own).clamp(max=int(ids.max()))}


@act
def map_left_out(scene: Scene, values: Values) -> Values:
    """Draft ids are taken for target ids."""
    ids = values["map"]
    return {"map": torch.arange(len(ids), dtype=ids.dtype, device=ids.device)}
