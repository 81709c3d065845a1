"""A pair in the shape of Llama-3-8B, for times only: every layer above the first is one and the same.

Written as float16 in shards, so that 16 GB are on the disk in half a minute.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from cases import checkpoints
from cases.recipes import Noise, Recipe, Weights
from harness.engines.process import Launch

RECIPE = Recipe(
    name="bench-8b",
    seed=8,
    vocab=128256,
    hidden=4096,
    intermediate=14336,
    layers=2,
    heads=32,
    kv_heads=8,
    head_dim=128,
)
LAYERS = 32
UPPER = "model.layers.1."
INDEX = "model.safetensors.index.json"


class QuickNoise(Noise):
    """NumPy's own normal numbers: six times as fast, and not the same on every machine."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def draw(self, *shape: int, std: float) -> np.ndarray:
        return self._random.standard_normal(shape, dtype=np.float32) * np.float32(std)


def launched(launch: Launch, root: Path) -> Launch:
    """The same launch with the deep pair in place of its own, which is made if it is not there."""
    target, draft = make(root / RECIPE.name)
    own = {"model_path": str(target), "speculative_draft_model_path": str(draft)}
    return replace(launch, boot={**launch.boot, "arguments": {**launch.boot["arguments"], **own}})


def make(root: Path) -> tuple[Path, Path]:
    """Folders of the target and the draft."""
    target, draft = root / "target", root / "draft"
    if not (draft / INDEX).exists():
        noise = QuickNoise(RECIPE.seed)
        weights = checkpoints.target_weights(noise, RECIPE)
        _write(draft, checkpoints.draft_weights(noise, RECIPE, weights), "LlamaForCausalLMEagle", layers=1)
        _write(target, weights, RECIPE.target_architecture, layers=LAYERS)
    return target, draft


def _write(folder: Path, weights: Weights, architecture: str, *, layers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: value.astype(np.float16) for name, value in weights.items()}
    shards = [{name: value for name, value in halves.items() if not name.startswith(UPPER)}]
    upper = {name.removeprefix(UPPER): value for name, value in halves.items() if name.startswith(UPPER)}
    shards += [{f"model.layers.{at}.{name}": value for name, value in upper.items()} for at in range(1, layers)]
    places = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    config = checkpoints.base_config(RECIPE, architecture=architecture, layers=layers)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
