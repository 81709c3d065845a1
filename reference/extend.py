"""What the draft head is fed: the token sequence shifted left by one against the target's hidden states.

Source: EAGLE (arXiv 2401.15077) section 3.1: the head at row j predicts the feature of j+1 from the feature of j and
the token that was really chosen at j+1. This module must not run a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """Draft rows start..start+e-1: input_ids int64 [e], positions int64 [e]."""

    input_ids: Tensor
    positions: Tensor


def rotate(tokens: Tensor, start: int, stop: int) -> Rotated:
    """Draft rows start..stop-1 of a request with `tokens` int64 [T]: row j carries tokens[j+1] at position j.

    The same rule serves a prompt chunk [start, stop) and the tokens a verify committed. The last row of a final chunk
    needs the token the target chose after it, so that token must be in `tokens`: IndexError otherwise.
    """
    if not 0 <= start <= stop < len(tokens):
        raise IndexError(f"draft rows {start}..{stop - 1} need token {stop}, but the request has {len(tokens)} tokens")
    return Rotated(input_ids=tokens[start + 1 : stop + 1], positions=torch.arange(start, stop))
