"""Pairs in which no two tensors are alike: another pair's, with every weight of its draft and of all norms moved a bit.

What the draft took from the target is then near it, so that they still agree often, and a multiple of nothing. It must
not write files.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cases.recipes import Noise, Pair, Weights

#: How far weights lie from what they were, relative to it: of norms, and of all else in a draft.
NORMS, DRAFT = 0.05, 0.02
#: What a draft that is stored with its target shares with it, whatever its own folder says.
SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def perturbed(noise: Noise, pair: Pair) -> Pair:
    """The pair with its target's norms and its draft moved, also where the draft lies in the target's folder."""
    one_folder = pair.target_config == pair.draft_config
    both = {name for name in pair.draft if one_folder and not name.endswith(SHARED)}
    target: Weights = {
        name: _moved(noise, value, NORMS) if _is_norm(name) and name not in both else value
        for name, value in pair.target.items()
    }
    draft: Weights = {
        name: value
        if name.endswith(SHARED) or value.dtype != np.float32
        else _moved(noise, value, NORMS if _is_norm(name) else DRAFT)
        for name, value in pair.draft.items()
    }
    return replace(pair, target=target | {name: draft[name] for name in pair.target if name in both}, draft=draft)


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _moved(noise: Noise, value: np.ndarray, spread: float) -> np.ndarray:
    """What is zero stays zero, so that bos and eos are never proposed; but norms of ones that are stored less one."""
    drawn = noise.draw(*value.shape, std=spread)
    moved: np.ndarray = value * np.abs(1 + drawn) if value.any() else drawn
    return moved
