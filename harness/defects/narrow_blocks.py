"""F-027: in CUDA graphs MTP layers behind the first attend by blocks of as many rows as the first has.

Layer i of a multi-layer draft runs `width + i` rows a request there, where an engine may hand its attention blocks of
`width` rows, one after the other from the batch's first row on: it takes the rows of a batch for narrower ones. A row
then attends the cache of whose block it fell into, and the rows before it in that block, whoever they belong to; the
rows behind the last block are attended by nobody, and what an attention says of them is whatever its memory held. A
row's own key and value do not change, so nothing of it outlives the round but what it proposes.

Written from the definition of attention alone. This module must see an engine's trace only through `EngineView`; a
part says which batch it was in, and for how many requests its graph was captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.contract.batches import Part
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.contract.types import Phase
from harness.defects.refused_states import verified_states
from reference.departures import Departure, Followed
from reference.mtp import MtpHead, MtpLayer
from reference.windows import Cached, Window, cached_rows


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


#: A request's part in a batch, in one layer, and how it is found again: DP rank, round, rid, layer.
Run = tuple[Part, int, Block]
Place = tuple[int, int, str, int]


class NarrowBlocks(Departure):
    """said: what the last row of each part says where its draft extend ran in a graph; None is not known."""

    def __init__(self) -> None:
        self.said: dict[Place, Tensor | None] = {}

    def follow(self, scenario: Scenario, requests: Sequence[Followed]) -> None:
        runs = [run for request in requests for run in _runs(request)]
        self.said = said_in_graphs(requests[0].head, requests[0].spec, runs) if requests else {}

    def says(self, part: Part, layer: int, g: Tensor) -> Tensor | None:
        said = self.said.get(_place(part, layer), g)
        return said if said is not None and bool(said.isfinite().all()) else None


def _place(part: Part, layer: int) -> Place:
    return part.record.dp_rank, part.record.index, part.rid, layer


def _runs(request: Followed) -> Iterator[Run]:
    """The rows of each decode round's draft extend by layer, refused nodes included."""
    parts, windows, text = [part for part, _ in request.ran], request.filled, request.timeline.tokens
    verified = verified_states(request)
    for layer in range(1, request.spec.num_steps if windows else 1):
        helds = cached_rows(text, request.hidden[: windows[-1].stop], windows, layer, request.reads)
        for part, held, window in zip(parts, helds, windows, strict=True):
            if part.start in verified and part.record.mode == "DECODE" and window.again:
                yield part, layer, block_of(held, window, verified[part.start], layer)


def block_of(held: Cached, window: Window, verified: Tensor, i: int) -> Block:
    """The rows that layer i ran for one request: those it keeps, then the refused nodes, whose token is 0.

    verified: states [n,h] of all nodes of the verify before. Where the text has fewer rows before the window than run
    once more, as behind a prompt of one token, the first ones stand at position 0 for no token of it: not known.
    """
    first, kept = window.first(i), window.stop - window.start
    refused, width = len(verified) - kept, held.states.shape[1]
    ghosts = window.again[i] - (window.start - first)
    unknown = torch.full((ghosts, width), float("nan"), dtype=held.states.dtype, device=held.states.device)
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
        read = torch.stack(states)
        places = torch.tensor(positions, device=read.device)
        g = layer.forward(torch.tensor(tokens, device=read.device), read, places)[0][-1]
        said.append(g if bool(g.isfinite().all()) else None)
    return said


def said_in_graphs(head: MtpHead, spec: SpecConfig, runs: Sequence[Run]) -> dict[Place, Tensor | None]:
    """What each last row says, behind the first layer, of every batch that ran in a graph and is known as a whole."""
    blocks = {_place(part, layer): block for part, layer, block in runs}
    records = {(part.record.dp_rank, part.record.index): part.record for part, _, _ in runs}
    found = dict[Place, Tensor | None]()
    for place, record in records.items():
        batch = record.graphs.get(str(Phase.EXTEND), 0)
        for layer in range(1, spec.num_steps if batch else 1):
            names = [(*place, rid, layer) for rid in record.rids]
            if all(name in blocks for name in names):
                own = [blocks[name] for name in names]
                found.update(
                    zip(
                        names,
                        said_narrowly(head.layers[layer], own, width=spec.num_draft_tokens, batch=batch),
                        strict=True,
                    )
                )
    return found
