"""From the two folders of a pair to the models in them, and to the session that speaks for them.

It must not build anything itself.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness.contract.types import SpecConfig
from reference import mla, mtp, step
from reference.chain import Sight
from reference.checkpoint import read_json
from reference.heads import load_head
from reference.model import Head, Target
from reference.mtp import MtpHead
from reference.mtp_session import MtpSession
from reference.session import ReferenceSession

AnyHead = Head | MtpHead


def load_pair(
    target: Path, draft: Path, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None
) -> tuple[Target, AnyHead]:
    """Read both folders by the target's architecture; CheckpointError if they are not a pair built here.

    held: the dtype the weights are rounded to first, as an engine of that dtype holds them.
    """
    kind, model = architecture(target), load_target(target, dtype, held=held)
    if kind == step.ARCHITECTURE:
        return model, step.load_head(draft, model, dtype, held=held)
    if kind == mtp.ARCHITECTURE:
        return model, MtpHead.load(draft, model, dtype, held=held)
    return model, load_head(draft, model, dtype, held=held)


def architecture(path: Path) -> str | None:
    """What a folder's config names as its one architecture; None where it names another number of them."""
    found = read_json(Path(path) / "config.json").get("architectures")
    return found[0] if isinstance(found, list) and len(found) == 1 else None


def load_target(path: Path, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None) -> Target:
    """Read the target's folder by its architecture; CheckpointError if none built here. held: see Target.load."""
    loaders = {
        mla.ARCHITECTURE: mla.load_target,
        mtp.ARCHITECTURE: mtp.load_target,
        step.ARCHITECTURE: step.load_target,
    }
    return loaders.get(architecture(path) or "", Target.load)(path, dtype, held=held)


def session_of(
    target: Target,
    head: AnyHead,
    spec: SpecConfig,
    *,
    sight: Sight = "ancestors",
    guesses: bool = False,
    refused: bool = False,
    shared: bool = False,
    narrow: bool = False,
) -> ReferenceSession:
    """The session for these settings; ValueError if the head does not draft that way. The last four: MtpSession."""
    if isinstance(head, MtpHead):
        return MtpSession(head, spec, guesses=guesses, refused=refused, shared=shared, narrow=narrow)
    return ReferenceSession(target, head, spec, sight=sight)
