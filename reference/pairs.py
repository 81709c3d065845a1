"""Loads the models of a pair from its two folders, by the architecture that each names.

A target that is not built here is its own module from Hugging Face; a draft is always ours. This module must not build
anything itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from reference import eagle3, families, mla, model, mtp
from reference.checkpoint import CheckpointError, read_json
from reference.hf_target import HfTarget
from reference.model import Head, PaperTarget, Target
from reference.mtp import MtpHead

AnyHead = Head | MtpHead
_TARGETS: dict[str | None, Callable[..., PaperTarget]] = {
    mla.ARCHITECTURE: mla.load_target,
    mla.V2_ARCHITECTURE: mla.load_target,
    **dict.fromkeys(families.FAMILIES, families.load_target),
    mtp.MIMO_ARCHITECTURE: mtp.load_mimo_target,
    model.STEP_ARCHITECTURE: mtp.load_step_target,
}
_HEADS: dict[str | None, Callable[..., AnyHead]] = {
    model.DRAFT_ARCHITECTURE: model.DraftHead.load,
    eagle3.ARCHITECTURE: eagle3.Eagle3Head.load,
    mla.ARCHITECTURE: mla.load_head,
    **dict.fromkeys(families.FAMILIES, families.load_head),
    mtp.MIMO_ARCHITECTURE: MtpHead.load,
    model.STEP_ARCHITECTURE: mtp.load_step_head,
}


def load_pair(
    target: Path,
    draft: Path,
    dtype: torch.dtype = torch.float32,
    *,
    held: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Target, AnyHead]:
    """Read both folders; CheckpointError if they are not a pair built here.

    dtype: what they compute in. held: the dtype the weights are kept in, as an engine of that dtype holds them; dtype
    unless said. The target that comes back is the head's.
    """
    read = load_target(target, dtype, held=held, device=device)
    return read, load_head(draft, read, held=held)


def load_target(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    held: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Target:
    """Read the target's folder; CheckpointError with what each provider says if none has it. See load_pair."""
    try:
        return _TARGETS.get(_architecture(path), PaperTarget.load)(path, dtype, held=held, device=device)
    except CheckpointError as ours:
        try:
            return HfTarget.load(path, dtype, held=held, device=device)
        except CheckpointError as theirs:
            raise CheckpointError(f"{ours}\n  nor does transformers provide it: {theirs}") from theirs


def load_head(path: Path, target: Target, *, held: torch.dtype | None = None) -> AnyHead:
    """Read a draft folder; CheckpointError if none built here, or if it does not fit `target`.

    It computes in the target's dtype, on its device. held: see load_pair.
    """
    if _architecture(path) not in _HEADS:
        found = read_json(Path(path) / "config.json").get("architectures")
        raise CheckpointError(f"{path}: architectures is {found!r}; expected one of {', '.join(map(str, _HEADS))}")
    head = _HEADS[_architecture(path)](path, target, held=held)
    if isinstance(target, HfTarget):
        target.carries(head)
    return head


def _architecture(path: Path) -> str | None:
    """What a folder's config names as its one architecture; None where it names another number of them."""
    found = read_json(Path(path) / "config.json").get("architectures")
    return found[0] if isinstance(found, list) and len(found) == 1 else None
