"""Attention of new rows over kept ones, whatever made their keys and values.

A forward runs m new rows behind T rows that ran before and were kept; `Sight` says which rows each new row sees, so one
mechanism serves a prompt, its chunks, one more token, draft beams and the nodes of a tree. Queries go block by block: a
sequence of 32,000 rows never makes a [T,T] matrix of all heads. This module must not know a model.

Shapes: T kept rows, m new rows, J = T + m, H query heads, G key/value heads, d width of a key, v of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: How many scores (heads x queries x keys) exist at a time.
SCORES = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Which rows m new rows see: of the kept rows those before upto[i], of the new ones own[i].

    upto: int64 [m]. own: bool [m,m]; None is causal. A row sees itself. only: bool [m,T+m], of these those that a layer
    chose; None is all.
    """

    upto: Tensor
    own: Tensor | None = None
    only: Tensor | None = None

    @staticmethod
    def causal(rows: int, *, kept: int = 0, device: torch.device | str = "cpu") -> Sight:
        """`rows` new rows behind `kept` rows, each seeing all rows before it and itself."""
        return Sight(upto=torch.full((rows,), kept, device=device))

    @staticmethod
    def of(branches: Sequence[tuple[int, Sequence[int]]], *, device: torch.device | str = "cpu") -> Sight:
        """Branches side by side, each (kept rows it sees, parents within the branch, -1 for none).

        The rows of a branch see its kept rows, their ancestors and themselves, and nothing of another branch, so each
        answers as if it were alone.
        """
        upto = [seen for seen, parents in branches for _ in parents]
        own = torch.block_diag(*(ancestors(parents) for _, parents in branches)).bool()  # type: ignore[no-untyped-call]
        return Sight(upto=torch.tensor(upto, device=device), own=own.to(device))

    def mask(self, rows: slice, kept: int) -> Tensor:
        """bool [b,kept+s]: whom the new rows `rows` see; s are all m new rows, or those up to `rows.stop` if causal."""
        upto = self.upto[rows, None]
        before = torch.arange(kept, device=upto.device) < upto
        place = torch.arange(rows.stop, device=upto.device)
        own = place <= place[rows, None] if self.own is None else self.own[rows]
        seen = torch.cat((before, own), dim=1)
        return seen if self.only is None else seen & self.only[rows, : seen.shape[1]]


def ancestors(parents: Sequence[int]) -> Tensor:
    """parents [n] (-1 for none, each before its children) -> bool [n,n]: row sees itself and every ancestor."""
    seen = torch.eye(len(parents), dtype=torch.bool, device="cpu")
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class Kept:
    """What one layer keeps of the rows that it ran; each kind of layer has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValues(Kept):
    """keys [J,G,d], rotated; values [J,G,v]; positions int64 [J]."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def behind(self, kept: Kept | None) -> KeyValues:
        """These rows behind those that were kept."""
        if kept is None:
            return self
        assert isinstance(kept, KeyValues)
        return KeyValues(
            keys=torch.cat((kept.keys, self.keys)),
            values=torch.cat((kept.values, self.values)),
            positions=torch.cat((kept.positions, self.positions)),
        )


def attend(
    q: Tensor, held: KeyValues, sight: Sight, *, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """q [m,H,d] of the last m rows of `held` -> what they mix of its values, [m,H,v].

    Query heads g*H/G .. share key/value head g. window: a row sees positions greater than its own less this. sinks [H]:
    a score for each head that takes its share of the softmax and mixes nothing.
    """
    (m, heads, d), (j, groups, _) = q.shape, held.keys.shape
    kept, each = j - m, heads // groups
    keys, values = held.keys.permute(1, 2, 0), held.values.transpose(0, 1)  # [G,d,J], [G,J,v]
    positions, mixed, step = held.positions[kept:], list[Tensor](), max(1, SCORES // (heads * j))
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        count, seen = rows.stop - start, sight.mask(rows, kept)
        width = seen.shape[1]
        if window is not None:
            seen &= held.positions[:width] > positions[rows, None] - window
        asked = q[rows].view(count, groups, each, d).permute(1, 2, 0, 3).reshape(groups, each * count, d)
        scores = (asked @ keys[:, :, :width]).view(heads, count, width) * scale
        scores = scores.masked_fill_(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(q.dtype)[:, None, None].expand(heads, count, 1)), dim=-1)
        weight = scores.softmax(dim=-1)[:, :, :width].reshape(groups, each * count, width)
        mixed.append((weight @ values[:, :width]).view(heads, count, -1).transpose(0, 1))
    return torch.cat(mixed)
