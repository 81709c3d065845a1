"""F-011: attention by the plan of an earlier forward: which rows of a batch it covers, and what those then say.

A plan cuts the rows of a batch into blocks, one after the other. Each was made for one request of the forward that was
planned, and is as long as what that request ran then. Rows that fall into a block attend what that request had in its
cache at the time, and the rows before them in the block, whoever they belong to; rows behind the last block are
attended for by nobody, and what an attention says of them is whatever its memory held. No run assumes
this: it explains recorded rounds.

Written from the definition of attention alone. This module must not look at a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.model import PaperTarget
from reference.mtp import MtpLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request of the forward that a plan was made for.

    cached: the c tokens that its rows in the cache had read; states [c,h]: the states that a draft layer had read with
    them, None for a target. rows: how many it ran.
    """

    cached: tuple[int, ...]
    rows: int
    states: Tensor | None = None


def target_states(
    target: PaperTarget, plan: Sequence[Planned], tokens: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """The target's last states [m,h] of the first m rows of a batch, which are those that the plan covers.

    tokens, positions: of all rows of the batch.
    """

    def said(one: Planned, ids: Tensor, places: Tensor, rows: slice) -> Tensor:
        return target.forward(ids, places)

    return _by_blocks(plan, tokens, positions, said)


def layer_states(
    layer: MtpLayer, plan: Sequence[Planned], tokens: Sequence[int], states: Tensor, positions: Sequence[int]
) -> Tensor:
    """g [m,h] of the first m rows of a batch in one draft layer; tokens, states [R,h], positions: of all its rows."""

    def said(one: Planned, ids: Tensor, places: Tensor, rows: slice) -> Tensor:
        held = states[rows] if one.states is None else torch.cat((one.states, states[rows]))
        return layer.forward(ids, held, places)[0]

    return _by_blocks(plan, tokens, positions, said)


def _by_blocks(
    plan: Sequence[Planned],
    tokens: Sequence[int],
    positions: Sequence[int],
    said: Callable[[Planned, Tensor, Tensor, slice], Tensor],
) -> Tensor:
    """Block by block; said: of one block with its cache in front, by tokens, positions and which rows of the batch."""
    found, begin = list[Tensor](), 0
    for one in plan:
        rows = slice(begin, min(begin + one.rows, len(tokens)))
        begin, cached = rows.stop, len(one.cached)
        ids = torch.tensor([*one.cached, *tokens[rows]])
        places = torch.tensor([*range(cached), *positions[rows]])
        found.append(said(one, ids, places, rows)[cached:])
    return torch.cat(found)
