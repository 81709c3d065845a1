"""Where the tiny pairs lie that are made on the spot. It must not import torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from cases import checkpoints
from cases.adapters import beside
from cases.folders import made_once
from harness.engines import envs


def root() -> Path:
    """The folder of all of them."""
    return envs.home() / "checkpoints"


def weights_of(name: str, selector: str, *, source: str = "tensor") -> tuple[Path, ...]:
    """The folders with a pair's target, draft, or all: from disk all is one folder, as MTP pairs are published."""
    pair = checkpoints.make(name, root())
    if selector == "all" and source == "disk":
        return (made_once(beside(pair.target, "whole"), lambda place: _whole(pair, place)),)
    return {"target": (pair.target,), "draft": (pair.draft,), "all": (pair.target, pair.draft)}[selector]


def _whole(pair: checkpoints.Checkpoint, place: Path) -> None:
    shutil.copy(pair.target / "config.json", place)
    for folder in (pair.target, pair.draft):
        shutil.copy(folder / "model.safetensors", place / f"{folder.name}.safetensors")
