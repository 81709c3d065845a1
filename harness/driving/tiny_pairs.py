"""Where the tiny pairs lie that are made on the spot. It must not import torch."""

from __future__ import annotations

from pathlib import Path

from cases import checkpoints
from harness.engines import envs


def root() -> Path:
    """The folder of all of them."""
    return envs.home() / "checkpoints"


def target_of(name: str) -> Path:
    """The target folder of one, made if it is not there."""
    return checkpoints.make(name, root()).target
