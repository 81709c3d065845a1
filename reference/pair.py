"""From the two folders of a pair to the models in them, and to the session that speaks for them.

It must not build anything itself.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness.contract.types import SpecConfig
from reference import mtp, step
from reference.chain import Sight
from reference.heads import load_head
from reference.model import Head, Target, read_json
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
    found = read_json(Path(target) / "config.json").get("architectures")
    if found == [step.ARCHITECTURE]:
        chained = step.load_target(target, dtype, held=held)
        return chained, step.load_head(draft, chained, dtype, held=held)
    if found == [mtp.ARCHITECTURE]:
        model = mtp.load_target(target, dtype, held=held)
        return model, MtpHead.load(draft, model, dtype, held=held)
    model = Target.load(target, dtype, held=held)
    return model, load_head(draft, model, dtype, held=held)


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
