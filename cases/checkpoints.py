"""Tiny pairs on disk: made on the spot from a seed, byte for byte the same on every machine, and verified when there.

Nothing is trained here and no matrix product takes part, so thread counts and BLAS builds cannot change a bit. One
kind was trained elsewhere and is read from files (`trained_weights`). This module must not import sglang or
transformers, nor the reference (and so torch).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from cases.folders import made_once
from cases.pairs import RECIPES, pair_of
from cases.recipes import Recipe, Weights
from harness.contract import plain_files
from harness.contract.usage import UserError

#: Raise it whenever the same name and seed would give other bytes.
RECIPE_VERSION = 1
MANIFEST = "manifest.json"


class CheckpointMakeError(UserError):
    """A pair cannot be made or reused: names the place, what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A pair on disk: `target` and `draft` are folders with config.json and model.safetensors."""

    name: str
    root: Path
    target: Path
    draft: Path
    manifest: dict[str, Any]


def _write_model(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ordered = {name: np.ascontiguousarray(weights[name]) for name in sorted(weights)}
    (folder / "model.safetensors").write_bytes(save(ordered, metadata={"format": "pt"}))


def _sums(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _build(recipe: Recipe, root: Path) -> None:
    pair = pair_of(recipe)
    _write_model(root / "target", pair.target_config, pair.target)
    _write_model(root / "draft", pair.draft_config, pair.draft)
    manifest = _identity(recipe) | {"files": _sums(root)}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def _identity(recipe: Recipe) -> dict[str, Any]:
    fields = json.loads(json.dumps(asdict(recipe)))  # as the manifest gives them back
    return {"name": recipe.name, "recipe_version": RECIPE_VERSION, "recipe": fields}


def _open(recipe: Recipe, root: Path) -> Checkpoint:
    """The pair at `root`, or CheckpointMakeError if it is not the one `recipe` makes."""
    advice = f"\n  remove it, and it is made again:  rm -r {root}"
    try:
        manifest = json.loads(plain_files.content(root / MANIFEST))
    except (OSError, ValueError) as error:
        message = f"{root} has no readable {MANIFEST} ({error}): not made by this module{advice}"
        raise CheckpointMakeError(message) from error
    for key, expected in _identity(recipe).items():
        if manifest.get(key) != expected:
            raise CheckpointMakeError(f"{root}: {key} is {manifest.get(key)!r}, expected {expected!r}{advice}")
    found, recorded = _sums(root), manifest.get("files", {})
    for name in sorted(found.keys() | recorded.keys()):
        if found.get(name) != recorded.get(name):
            raise CheckpointMakeError(
                f"{root / name} is damaged: sha256 {found.get(name, 'missing')}, "
                f"manifest says {recorded.get(name, 'nothing')}{advice}"
            )
    return Checkpoint(name=recipe.name, root=root, target=root / "target", draft=root / "draft", manifest=manifest)


def make(name: str, root: Path) -> Checkpoint:
    """The pair called `name` in a folder of `root`, see `place_of`: made if absent, verified if present.

    The folder appears by one rename, so two processes may make the same pair at the same time.
    Raises CheckpointMakeError for an unknown name and for a damaged or foreign folder.
    """
    if name not in RECIPES:
        raise CheckpointMakeError(f"no checkpoint called {name!r}; allowed: {', '.join(sorted(RECIPES))}")
    return make_recipe(RECIPES[name], root)


def make_recipe(recipe: Recipe, root: Path) -> Checkpoint:
    """As `make`, for a recipe that has no name in the registry."""
    return _open(recipe, made_once(place_of(recipe, Path(root)), partial(_build, recipe)))


def place_of(recipe: Recipe, root: Path) -> Path:
    """The folder of a recipe's pair; another recipe of that name has another, which processes may still read."""
    identity = json.dumps(_identity(recipe), sort_keys=True)
    return root / f"{recipe.name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def main() -> None:
    """`python -m cases.checkpoints NAME DIR` makes a pair and prints its two folders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", help=f"one of: {', '.join(sorted(RECIPES))}")
    parser.add_argument("root", type=Path)
    arguments = parser.parse_args()
    made = make(arguments.name, arguments.root)
    print(made.target)
    print(made.draft)


if __name__ == "__main__":
    main()
