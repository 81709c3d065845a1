"""Loads the models of a pair from its two folders, by the architecture that each names.

A target that is not built here is its own module from Hugging Face; a draft is always ours. This module must not build
anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from reference import eagle1, eagle3, families, llama, mtp, nemotron
from reference.checkpoint import CheckpointError, DamagedError, Weights, read_json
from reference.hf_target import HfTarget
from reference.model import Head, PaperTarget, Target, on_target
from reference.mtp import MtpHead
from reference.nextn import NextNHead

AnyHead = Head | MtpHead
_TARGETS: dict[str, Callable[..., PaperTarget]] = {
    **dict.fromkeys(families.FAMILIES, families.load_target),
    mtp.MIMO_ARCHITECTURE: mtp.load_mimo_target,
    mtp.STEP_ARCHITECTURE: mtp.load_step_target,
    nemotron.ARCHITECTURE: nemotron.load_target,
    **dict.fromkeys(llama.ARCHITECTURES, llama.load_target),
}
_HEADS: dict[str, Callable[..., AnyHead]] = {
    **dict.fromkeys((*families.FAMILIES, *families.OWN_FOLDERS), families.load_head),
    mtp.MIMO_ARCHITECTURE: MtpHead.load,
    mtp.STEP_ARCHITECTURE: mtp.load_step_head,
    nemotron.ARCHITECTURE: nemotron.load_head,
}


def load_pair(
    target: Path,
    draft: Path,
    dtype: torch.dtype = torch.float32,
    *,
    held: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    provider: str = "auto",
) -> tuple[Target, AnyHead]:
    """Read both folders; CheckpointError if they are not a pair built here.

    provider: who provides the target, paper or transformers; auto: the first that can.

    dtype: what they compute in. held: the dtype the weights are kept in, as an engine of that dtype holds them; dtype
    unless said. The target that comes back is the head's.
    """
    read = load_target(target, dtype, held=held, device=device, provider=provider)
    return read, load_head(draft, read, held=held)


def load_mixed(
    target: Path, draft: Path, *, own: Path, held: torch.dtype, target_held: torch.dtype | None = None
) -> AnyHead:
    """A draft over another target than `own`, which it came with: new weights for one of the two, and not the other.

    target_held: the dtype that the target's weights are read in, where it is not held.

    A next-token layer shares the embedding and head of whatever it runs behind; what its folder has are its own
    target's (see reference.nextn), and are compared with that.
    """
    head = load_pair(own, draft, held=held)[1]
    if isinstance(head, NextNHead):
        return on_target(head, load_target(target, held=target_held or held))
    return head if own == target else load_head(draft, load_target(target, held=target_held or held), held=held)


def load_target(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    held: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    provider: str = "auto",
) -> Target:
    """Read the target's folder; CheckpointError with what each provider says if none has it. See load_pair."""
    if provider == HfTarget.provider:
        return HfTarget.load(path, dtype, held=held, device=device)
    try:
        return paper_target(path, dtype, held=held, device=device)
    except CheckpointError as ours:
        if provider == PaperTarget.provider:
            raise
        try:
            found = HfTarget.load(path, dtype, held=held, device=device)
            found.instead = str(ours)
            return found
        except CheckpointError as theirs:
            damaged = any(isinstance(error, DamagedError) for error in (ours, theirs))
            kind = DamagedError if damaged else CheckpointError
            raise kind(f"{ours}\n  nor does transformers provide it: {theirs}") from theirs


def paper_target(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    held: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> PaperTarget:
    """The same, where it is to be ours: CheckpointError if none built here."""
    return _known(path, _TARGETS)(path, dtype, held=held or dtype, device=device)


def is_ours(path: Path) -> bool:
    """Whether a target of this folder's architecture is built here, if its config asks for nothing else."""
    try:
        return bool(_known(path, _TARGETS))
    except CheckpointError:
        return False


def load_head(path: Path, target: Target, *, held: torch.dtype | None = None) -> AnyHead:
    """Read a draft folder; CheckpointError if none built here, or if it does not fit `target`.

    It computes in the target's dtype, on its device. held: see load_pair.
    """
    head = (_eagle(path) or _known(path, _HEADS))(path, target, held=held)
    if isinstance(target, HfTarget):
        target.carries(head)
    return head


def _eagle(path: Path) -> Callable[..., AnyHead] | None:
    """EAGLE heads are known by their tensors: published ones name the target's architecture, or one of their own."""
    names = {name.removeprefix("model.") for name in Weights(path, torch.float32)}
    if {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "d2t"} & names:
        return eagle3.Eagle3Head.load
    return eagle1.DraftHead.load if "fc.weight" in names else None


Loader = TypeVar("Loader")


def _known(path: Path, loaders: Mapping[str, Loader]) -> Loader:
    """The loader of the one architecture that a folder's config names."""
    found = read_json(Path(path) / "config.json").get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in loaders:
        raise CheckpointError(f"{path}: architectures is {found!r}; expected one of {', '.join(sorted(loaders))}")
    return loaders[found[0]]
