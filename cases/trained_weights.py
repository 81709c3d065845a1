"""Pairs that were trained and are kept as files: `cases/trained`, which `cases.training.train` wrote.

Read as they lie there, after their digests; nothing is computed. `checkpoints` writes them where an engine finds every
other pair. It must not import torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors.numpy import load_file

from cases.recipes import Noise, Pair, Recipe, Weights
from harness.contract import plain_files
from harness.contract.usage import UserError

FOLDER = Path(__file__).parent / "trained"
#: How they were made, and the SHA-256 of each file.
MANIFEST = "trained.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRecipe(Recipe):
    """A byte-level Llama that was trained, with the EAGLE-1 head that was trained for it.

    Its fields say what lies there; no seed and no gain decides a byte of it. head: the folder of its draft.
    """

    head: ClassVar[str] = "eagle1"

    seed: int = 0
    vocab: int = 320
    hidden: int = 256
    intermediate: int = 640
    layers: int = 5
    head_dim: int = 64
    max_position: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedEagle3Recipe(TrainedRecipe):
    """The same target with its EAGLE-3 head."""

    algorithm: ClassVar[str] = "EAGLE3"
    head: ClassVar[str] = "eagle3"

    aux_layers: tuple[int, ...] = (0, 2, 3)
    draft_vocab: int = 128


class TrainedPairError(UserError):
    """A kept file is not the one that was trained."""


def pair(noise: Noise, recipe: TrainedRecipe, *, folder: Path = FOLDER) -> Pair:
    """The kept target and the recipe's head; TrainedPairError for a file that is not what the manifest says."""
    target_config, target = _model(folder, "target")
    draft_config, draft = _model(folder, recipe.head)
    return Pair(target_config=target_config, target=target, draft_config=draft_config, draft=draft)


def _model(folder: Path, name: str) -> tuple[dict[str, Any], Weights]:
    digests = json.loads((folder / MANIFEST).read_text())["files"]
    for file in (f"{name}/config.json", f"{name}/model.safetensors"):
        found = plain_files.sha256(folder / file)
        if found != digests[file]:
            raise TrainedPairError(
                f"{folder / file} is damaged: sha256 {found}, {MANIFEST} says {digests[file]}\n"
                "  install eaglecheck again"
            )
    return json.loads((folder / name / "config.json").read_text()), load_file(folder / name / "model.safetensors")
