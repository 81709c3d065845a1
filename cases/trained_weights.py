"""Pairs that were trained and are kept as files: `cases/trained`, which `cases.training.train` wrote.

Read as they lie there, after their digests; nothing is computed. `checkpoints` writes them where an engine finds every
other pair. It must not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from cases.recipes import Noise, Pair, TrainedRecipe, Weights
from harness.contract import plain_files
from harness.contract.usage import UserError

FOLDER = Path(__file__).parent / "trained"
#: How they were made, and the SHA-256 of each file.
MANIFEST = "trained.json"


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
