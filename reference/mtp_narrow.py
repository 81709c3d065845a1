"""Attention that takes the rows of a batch for those of narrower requests: which rows each row then attends.

Inside CUDA graphs layer i of a multi-layer draft runs `width + i` rows a request, where an engine may hand its
attention blocks of `width` rows, one after the other from the batch's first row on (docs/findings/F-027.md). A row
then attends the cache of whose block it fell into, and the rows before it in that block, whoever they belong to; the
rows behind the last block are attended by nobody, and what an attention says of them is whatever its memory held. A
row's own key and value do not change, so nothing of it outlives the round but what it proposes.

Written from the definition of attention alone. This module must not look at a trace; a turn it is
given says which batch it was in, and for how many requests its graph was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.contract.types import Phase, SpecConfig
from reference.engine_view import Turn
from reference.model import causal
from reference.mtp import Held, MtpHead, MtpLayer, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One request's share of a batch in one layer.

    tokens [c+w], states [c+w,h], positions [c+w]: of the c rows in its cache, then of the w that it ran, refused ones
    too; a state that is not known is NaN. cached: c. last: which of the w rows proposes.
    """

    tokens: list[int]
    states: Tensor
    positions: list[int]
    cached: int
    last: int


#: A turn's share of a batch in one layer, and how it is found again: DP rank, round, rid, layer.
Run = tuple[Turn, int, Block]
Share = tuple[int, int, str, int]


def block_of(held: Held, window: Window, verified: Tensor, i: int) -> Block:
    """The rows that layer i ran for one request: those it keeps, then the refused nodes, whose token is 0.

    verified: states [n,h] of all nodes of the verify before. Where the text has fewer rows before the window than run
    once more, as behind a prompt of one token, the first ones stand at position 0 for no token of it: not known.
    """
    first, kept = window.first(i), window.stop - window.start
    refused, width = len(verified) - kept, held.states.shape[1]
    ghosts = window.again[i] - (window.start - first)
    unknown = torch.full((ghosts, width), float("nan"), dtype=held.states.dtype)
    return Block(
        tokens=[*held.tokens[:first], *[0] * ghosts, *held.tokens[first:], *[0] * refused],
        states=torch.cat((held.states[:first], unknown, held.states[first:], verified[kept:])),
        positions=[*range(first), *[0] * ghosts, *range(first, window.stop + refused)],
        cached=first,
        last=window.again[i] + kept - 1,
    )


def said_narrowly(layer: MtpLayer, blocks: Sequence[Block], *, width: int, batch: int) -> list[Tensor | None]:
    """g [h] of each request's last row; None where nobody attends it, or where what it attends is not known.

    width: how many rows an attention block has; batch: how many there are, padding included.
    """
    rows = [
        (token, state, position)
        for one in blocks
        for token, state, position in list(zip(one.tokens, one.states, one.positions, strict=True))[one.cached :]
    ]
    said, begin = list[Tensor | None](), 0
    for block in blocks:
        row = begin + block.last
        begin += len(block.tokens) - block.cached
        owner = row // width
        if owner >= batch:
            said.append(None)
            continue
        attended = rows[owner * width : row + 1]
        if owner < len(blocks):  # a block of padding has nothing in its cache
            whose = blocks[owner]
            cached = zip(whose.tokens, whose.states, whose.positions, strict=True)
            attended = [one for one, _ in zip(cached, range(whose.cached), strict=False)] + attended
        tokens, states, positions = zip(*attended, strict=True)
        count = len(tokens)
        g = layer.forward(torch.tensor(tokens), torch.stack(states), torch.tensor(positions), causal(count))[-1]
        said.append(g if bool(g.isfinite().all()) else None)
    return said


def said_in_graphs(head: MtpHead, spec: SpecConfig, runs: Sequence[Run]) -> dict[Share, Tensor | None]:
    """What each last row says, behind the first layer, of every batch that ran in a graph and is known as a whole."""
    blocks = {(turn.record.dp_rank, turn.record.index, turn.rid, layer): block for turn, layer, block in runs}
    records = {(turn.record.dp_rank, turn.record.index): turn.record for turn, _, _ in runs}
    found = dict[Share, Tensor | None]()
    for place, record in records.items():
        batch = record.graphs.get(str(Phase.EXTEND), 0)
        for layer in range(1, spec.k if batch else 1):
            names = [(*place, rid, layer) for rid in record.rids]
            if all(name in blocks for name in names):
                own = [blocks[name] for name in names]
                found.update(zip(names, said_narrowly(head.layers[layer], own, width=spec.n, batch=batch), strict=True))
    return found
