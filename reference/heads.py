"""From a draft folder to the head that is in it. This module must not build anything itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from reference import eagle3, mla, model
from reference.checkpoint import CheckpointError, read_json
from reference.eagle3 import Eagle3Head
from reference.model import DraftHead, Head, Target

_LOADERS: dict[str, Callable[..., Head]] = {
    model.DRAFT_ARCHITECTURE: DraftHead.load,
    eagle3.ARCHITECTURE: Eagle3Head.load,
    mla.ARCHITECTURE: mla.NextNHead.load,
}


def load_head(
    path: Path, target: Target, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None
) -> Head:
    """Read a draft folder by its architecture; CheckpointError if none built here, or if it does not fit `target`."""
    file = Path(path) / "config.json"
    found = read_json(file).get("architectures")
    name = found[0] if isinstance(found, list) and len(found) == 1 else None
    if name not in _LOADERS:
        raise CheckpointError(f"{file}: architectures is {found!r}; expected one of {', '.join(_LOADERS)}")
    return _LOADERS[name](path, target, dtype, held=held)
