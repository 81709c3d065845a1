"""States that an engine keeps of a request from one turn to the next, for rows that its layers run once more.

A pool of m states a request, filled with the last m rows of every turn's draft forward: of a verify with those of its
last nodes, accepted or not (docs/findings/F-020.md). This module must see an engine's trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from reference.engine_view import EngineView, Turn
from reference.mtp import MtpHead
from reference.turns import verify

#: Turns of one request, and what each committed.
Turns = Sequence[tuple[Turn, tuple[int, ...]]]


def verified_states(head: MtpHead, tokens: list[int], turns: Turns, view: EngineView) -> dict[int, Tensor]:
    """Start of a decode turn -> states [n,h] of the nodes that it verified, where the trace has them."""
    trees = [(turn.start, view.conditions(turn, None).tree) for turn, _ in turns if turn.record.mode == "DECODE"]
    known = [(start, tree) for start, tree in trees if tree is not None]
    answers = verify(head, torch.tensor(tokens), known)
    return {start: hidden for (start, _), (hidden, _) in zip(known, answers, strict=True)}


def pooled(verified: Mapping[int, Tensor], turns: Turns, hidden: Tensor, m: int) -> dict[int, Tensor]:
    """Start of a turn -> states [m,h] that the pool holds for it, where they are not the target's own.

    Those of the last nodes of the verify before; of a chunk of fewer than m rows its own, and before them NaN: the pool
    gets rows of another request, or none at all. hidden [>=R,h]: the target's states.
    """
    found = dict[int, Tensor]()
    for (turn, _), (after, _) in pairwise(turns):
        if turn.record.mode == "DECODE" and turn.start in verified:
            states = verified[turn.start]
            found[after.start] = states[len(states) - m :]
        elif turn.record.mode == "PREFILL" and turn.length < m:
            unknown = torch.full((m - turn.length, hidden.shape[1]), float("nan"), dtype=hidden.dtype)
            found[after.start] = torch.cat((unknown, hidden[turn.start : turn.start + turn.length]))
    return found
