"""Which target and draft folders stand for a scenario's checkpoint: the tiny ones made on the spot, or the user's own.

What the user's files show is refused before torch is imported (`own_pair`); the rest by the reference, before an engine
is booted (`judging.load_now`): what it can compute is accepted, whatever it is called. This module must not import
torch.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from cases import checkpoints, pairs
from cases.adapters import beside
from cases.folders import made_once
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError
from harness.driving.own_pair import OwnPair
from harness.engines import envs
from harness.engines.launch import dtype_on


def checkpoint_pairs(
    scenarios: Iterable[Scenario], *, device: str = "cpu", own: OwnPair | None = None
) -> dict[str, tuple[Path, Path]]:
    """(target, draft) folders for every checkpoint the scenarios name, made on the spot unless it is the user's own.

    On a device or in a dtype that a pair is not for, the pair made for it instead (see cases.pairs).
    """
    asked = {(one.checkpoint, dtype_on(device, one.engine.dtype)) for one in scenarios}
    if own is not None:
        return {name: own.folders for name, _ in asked}
    named = {(name, pairs.on_device(name, device, dtype)) for name, dtype in sorted(asked)}
    if twice := next((name for name, count in Counter(name for name, _ in named).items() if count > 1), None):
        raise UsageError(
            f"checkpoint {twice!r} is needed in several dtypes, each with a config of its own\n"
            "  allowed: one in a run:  --dtype bfloat16"
        )
    try:
        made = {name: checkpoints.make(instead, root()) for name, instead in named}
    except OSError as error:
        raise UsageError(
            f"cannot make checkpoints in {root()}: {error.strerror}\n"
            "  name a folder that can be written:  export EAGLECHECK_HOME=/path/with/space"
        ) from error
    return {name: (pair.target, pair.draft) for name, pair in made.items()}


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
