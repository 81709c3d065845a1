"""Layers that keep one matrix a head in place of all keys and values, as the recurrences that they are.

A row decays the matrix, writes a key and a value into it, and is read from it, behind a short convolution along the
text. What a row writes and how it is read says each kind of layer (`reference.delta`, `reference.mamba`). A branch
starts from the matrix behind the rows it sees; that one is made again from what the rows put into it.

Shapes: T kept and m new rows, J = T + m, h hidden width, H heads, n and v width of a key and value, C channels and w
width of the convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from reference.attention import Kept, Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What rows put into the matrices, float32: keys [J,H,n], values [J,H,v], strength and decay [J,H].

    corrects: a row writes what its value is beyond what the matrix says of its key already (the delta rule).
    """

    keys: Tensor
    values: Tensor
    strength: Tensor
    decay: Tensor
    corrects: bool

    def step(self, state: Tensor, row: int) -> Tensor:
        """state [H,n,v] -> behind row `row`."""
        key, faded, value = self.keys[row][:, :, None], state * self.decay[row][:, None, None], self.values[row]
        if self.corrects:
            value = value - (key * faded).sum(dim=1)
        return faded + key * (self.strength[row][:, None] * value)[:, None, :]

    def behind(self, before: Written) -> Written:
        """These rows behind others."""
        return replace(
            self,
            keys=torch.cat((before.keys, self.keys)),
            values=torch.cat((before.values, self.values)),
            strength=torch.cat((before.strength, self.strength)),
            decay=torch.cat((before.decay, self.decay)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentKept(Kept):
    """mixed [J,C]: rows as they enter the convolution; what they wrote; state [H,n,v] behind the last of them; w.

    state is None behind a branch, whose last row is not the last of the text.
    """

    mixed: Tensor
    written: Written
    state: Tensor | None
    conv: int


class RecurrentMixer(ABC):
    """One layer's convolution and recurrence. conv: its weight [C,1,w]; conv_bias [C] or None."""

    conv: Tensor
    conv_bias: Tensor | None = None

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, RecurrentKept]:
        """See reference.model.Attends; where a row stands is in the order of the rows, not in `positions`."""
        assert kept is None or isinstance(kept, RecurrentKept)
        mixed, aside = self._project(x)
        before, width = 0 if kept is None else len(kept.mixed), self.conv.shape[-1]
        parents = _parents(sight, len(x))
        all_mixed = mixed if kept is None else torch.cat((kept.mixed, mixed))
        queries, new = self._written(self._convolved(all_mixed, _paths(sight, parents, before, width)), aside)
        written = new if kept is None else new.behind(kept.written)
        states = _states(written, sight, parents, before, None if kept is None else kept.state)
        read = torch.stack(
            [(state * query[:, :, None]).sum(dim=1) for state, query in zip(states, queries, strict=True)]
        )
        state = states[-1] if sight.own is None else None
        return self._out(read, new, aside, x.dtype), RecurrentKept(
            mixed=all_mixed, written=written, state=state, conv=width
        )

    @abstractmethod
    def _project(self, x: Tensor) -> tuple[Tensor, Any]:
        """x [m,h] -> mixed [m,C], and what goes past the convolution."""

    @abstractmethod
    def _written(self, convolved: Tensor, aside: Any) -> tuple[Tensor, Written]:
        """convolved [m,C] -> with what rows are read, [m,H,n], and what they write."""

    @abstractmethod
    def _out(self, read: Tensor, written: Written, aside: Any, dtype: torch.dtype) -> Tensor:
        """read [m,H,v] -> what the layer adds, [m,h]."""

    def _convolved(self, mixed: Tensor, paths: Tensor) -> Tensor:
        """mixed [J,C], paths int64 [m,w] of rows of it, -1 for none -> [m,C]."""
        padded = torch.cat((mixed, torch.zeros_like(mixed[:1])))
        summed = (padded[paths] * self.conv[:, 0].T.to(mixed.dtype)).sum(dim=1)
        return silu(summed if self.conv_bias is None else summed + self.conv_bias.to(mixed.dtype))


def _states(written: Written, sight: Sight, parents: list[int], before: int, last: Tensor | None) -> list[Tensor]:
    """The matrices [H,n,v] behind each new row; `last`: behind the last kept one, where that is known."""
    state = torch.zeros(*written.keys.shape[1:], written.values.shape[-1]).to(written.keys)
    starts = {0: state} if last is None else {0: state, before: last}
    wanted = {int(sight.upto[i]) for i, parent in enumerate(parents) if parent < 0} - set(starts)
    for row in range(max(wanted, default=0)):
        state = written.step(state, row)
        if row + 1 in wanted:
            starts[row + 1] = state
    states = list[Tensor]()
    for i, parent in enumerate(parents):
        base = starts[int(sight.upto[i])] if parent < 0 else states[parent]
        states.append(written.step(base, before + i))
    return states


def _parents(sight: Sight, rows: int) -> list[int]:
    """The new row that each new row follows, -1 where it follows a kept one or none."""
    if sight.own is None:
        return list(range(-1, rows - 1))
    seen = [[j for j, own in enumerate(line) if own and j != i] for i, line in enumerate(sight.own.tolist())]
    return [max(line, default=-1) for line in seen]


def _paths(sight: Sight, parents: list[int], before: int, width: int) -> Tensor:
    """int64 [m,width]: for each new row the `width` rows that end with it on its way, -1 where there is none."""
    paths = list[list[int]]()
    for i, parent in enumerate(parents):
        seen = int(sight.upto[i])
        way = paths[parent] if parent >= 0 else [row if row >= 0 else -1 for row in range(seen - width, seen)]
        paths.append([*way[1:], before + i])
    return torch.tensor(paths, device=sight.upto.device)
