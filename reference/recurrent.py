"""The recurrent states behind each prefix of a request's text, as sums of their values (`both_sides.projections`).

A state says what was read, so that of a prefix and a token that was refused is one that no request may have: those are
there, too, by which whoever finds one can name it. This module must not judge.

Symbols: T tokens, L layers with a state, H heads, w rows that a convolution keeps, m rounds that refused something.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from harness.both_sides.projections import OF_A_HEAD, OF_A_ROW, weights
from harness.contract.trace import RECURRENT, RECURRENT_ROWS, Event
from reference.engine_view import EngineView
from reference.model import PaperTarget
from reference.recurrence import RecurrentKept
from reference.rounds import Drafts
from reference.tree import child_of

#: Of states, one a row: 'state' [m,L*H*2], and 'conv' [m,L*w*8] of the rows that a convolution keeps.
Sums = dict[str, Tensor]


def recurrent_states(drafts: Drafts, view: EngineView, before: int) -> tuple[Event, Sums] | None:
    """The sums behind 1 .. T tokens of one timeline, then of prefixes with a refused token behind them.

    before: rows of other timelines. The event says which row is what: `first`, the row of one token; `refused`, by
    committed length. None where no layer has a state, or nobody ran the text.
    """
    target, timeline = drafts.head.target, drafts.timeline
    if not isinstance(target, PaperTarget) or not timeline.parts:
        return None
    kept = [one for one in drafts.trunk.kept if isinstance(one, RecurrentKept)]
    if not kept:
        return None
    refused = dict[int, int]()
    for part, committed in timeline.parts:
        tree = view.conditions(part, None).tree if part.record.mode == "DECODE" and committed else None
        if tree is not None and (token := _first_refused(tree.tokens, tree.parents, committed)) is not None:
            refused[part.start + len(committed)] = token
    upto = torch.tensor(list(refused), device=target.device, dtype=torch.int64)
    tokens = torch.tensor(list(refused.values()), device=target.device, dtype=torch.int64)
    behind = target.kept_behind(drafts.trunk, tokens, upto) if refused else drafts.trunk.kept
    also = [one for one in behind if isinstance(one, RecurrentKept)]
    layers = [_layer(one, more, list(refused)) for one, more in zip(kept, also, strict=True)]
    sums = {name: torch.cat([one[name] for one in layers], 1) for name in layers[0]}
    part, length = timeline.parts[0][0], len(kept[0].mixed)
    data = {"rid": part.rid, "attempt": part.attempt, "first": before, "length": length}
    data["refused"] = {str(place): before + length + number for number, place in enumerate(refused)}
    return Event(name=RECURRENT_ROWS, scheduler_step=0, dp_rank=part.record.dp_rank, data=data), sums


def _first_refused(tokens: Sequence[int], parents: Sequence[int], committed: Sequence[int]) -> int | None:
    """The first proposal behind the last accepted node; committed: what the walk gave, its last one from no node."""
    node = 0
    for token in committed[:-1]:
        child = child_of(node, token, tokens, parents)
        if child is None:
            return None
        node = child
    return next((tokens[i] for i, parent in enumerate(parents) if parent == node and i), None)


def _layer(kept: RecurrentKept, also: RecurrentKept, refused: Sequence[int]) -> Sums:
    """One layer: the states behind each row of the text, then behind `also`'s rows at prefixes `refused`."""
    written, length, width = also.written, len(kept.mixed), also.conv - 1
    states = [torch.zeros(*written.keys.shape[1:], written.values.shape[-1]).to(written.keys)]
    for row in range(length):
        states.append(written.step(states[-1], row))
    states = states[1:]
    states += [written.step(states[place - 1], length + number) for number, place in enumerate(refused)]
    padded = torch.cat((torch.zeros_like(also.mixed[:1]).expand(width, -1), also.mixed))  # row i is at i + width
    rows = [padded[place + 1 : place + 1 + width] for place in range(length)]
    rows += [
        torch.cat((padded[place + 1 : place + width], padded[width + length + number][None]))
        for number, place in enumerate(refused)
    ]
    matrices, windows = torch.stack(states).float(), torch.stack(rows).float()  # [m,H,n,v], [m,w,C]
    of_heads = _weights(OF_A_HEAD, matrices.shape[-1], matrices.shape[-2]).to(matrices)
    of_rows = _weights(OF_A_ROW, windows.shape[-1]).to(windows)
    return {
        "state": torch.einsum("mhkv,pvk->mhp", matrices, of_heads).flatten(1),
        "conv": torch.einsum("mwc,pc->mwp", windows, of_rows).flatten(1),
    }


def _weights(count: int, *shape: int) -> Tensor:
    return torch.from_numpy(weights(count, math.prod(shape))).view(count, *shape)


def stacked(sums: Sequence[Sums]) -> dict[str, np.ndarray]:
    """As tensors of a trace."""
    names = sums[0] if sums else ()
    return {f"{RECURRENT}.{name}": torch.cat([one[name] for one in sums]).cpu().numpy() for name in names}
