"""F-020: rows that MTP layers run once more in CUDA graphs read the states of refused nodes.

An engine keeps m states of a request from one batch to the next, for the rows that its layers run once more: the last m
rows of every draft forward, and of a verify those of its last nodes, accepted or not. This module must see an engine's
trace only through `EngineView`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from harness.contract.batches import Part
from reference.departures import Departure, Followed, ReadsOtherwise
from reference.verify import verify
from reference.windows import Reads, Window


class RefusedStates(Departure):
    def reads(self, reads: Reads, request: Followed) -> Reads:
        return _Pooled(reads, request)


class _Pooled(ReadsOtherwise):
    def __init__(self, inner: Reads, request: Followed) -> None:
        super().__init__(inner)
        self.request = request

    @cached_property
    def pools(self) -> dict[int, Tensor]:
        request = self.request
        parts = [part for part, _ in request.ran]
        return pooled(verified_states(request), parts, request.hidden, request.spec.num_steps - 1)

    def states_again(self, window: Window, states: Tensor) -> Tensor:
        pool = self.pools.get(window.start)
        return super().states_again(window, states) if pool is None else pool[len(pool) - len(states) :]


def verified_states(request: Followed) -> dict[int, Tensor]:
    """Start of a decode round -> states [n,h] of the nodes that it verified, where the trace has them."""
    decodes = [part for part, _ in request.ran if part.record.mode == "DECODE"]
    trees = [(part.start, request.view.conditions(part, None).tree) for part in decodes]
    known = [(start, tree) for start, tree in trees if tree is not None]
    answers = verify(request.head, request.trunk, known)
    return {start: hidden for (start, _), (hidden, _) in zip(known, answers, strict=True)}


def pooled(verified: Mapping[int, Tensor], parts: Sequence[Part], hidden: Tensor, m: int) -> dict[int, Tensor]:
    """Start of a part -> states [m,h] that the pool holds for it, where they are not the target's own.

    Those of the last nodes of the verify before; of a chunk of fewer than m rows its own, and before them NaN: the pool
    gets rows of another request, or none at all. hidden [>=R,h]: the target's states.
    """
    found = dict[int, Tensor]()
    for part, after in pairwise(parts):
        if part.record.mode == "DECODE" and part.start in verified:
            states = verified[part.start]
            found[after.start] = states[len(states) - m :]
        elif part.record.mode == "PREFILL" and part.length < m:
            unknown = torch.full((m - part.length, hidden.shape[1]), float("nan"), dtype=hidden.dtype)
            found[after.start] = torch.cat((unknown, hidden[part.start : part.start + part.length]))
    return found
