"""Gated delta networks: a layer that keeps one matrix a head in place of all keys and values.

Written from Gated DeltaNet (arXiv 2412.06464) section 3 as the recurrence that it is, one row after the other:
S' = a S (1 - b k k^T) + b v k^T, o = S' q, with q, k and v behind a short convolution along the text and q and k of
length one. How Qwen3-Next and Qwen3.5 lay their projections out is from published configs, weight names and modelling
code. A branch starts from the matrix behind the rows it sees; that one is made again from what the rows put into it.

Shapes: T kept and m new rows, J = T + m, h hidden width, H value heads, K key heads, n and v width of a key and
value, C = 2Kn + Hv channels, w width of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from reference.attention import Kept, Sight
from reference.experts import Source
from reference.model import linear

#: What keeps a key of length zero from being divided by it.
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """K, H, n, v and w, and the h around them. eps: of the norm behind the heads.

    apart: projections stand in four parts, qkv, z, b and a, as Qwen3.5 has them; else in two, key head by key head.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    conv: int
    eps: float
    apart: bool = False

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What rows put into the matrices, float32: keys [J,H,n], values [J,H,v], strength b and decay a [J,H]."""

    keys: Tensor
    values: Tensor
    strength: Tensor
    decay: Tensor

    def step(self, state: Tensor, row: int) -> Tensor:
        """state [H,n,v] -> behind row `row`."""
        key, faded = self.keys[row][:, :, None], state * self.decay[row][:, None, None]
        known = (key * faded).sum(dim=1)
        return faded + key * (self.strength[row][:, None] * (self.values[row] - known))[:, None, :]

    def behind(self, before: Written) -> Written:
        """These rows behind others."""
        return Written(
            keys=torch.cat((before.keys, self.keys)),
            values=torch.cat((before.values, self.values)),
            strength=torch.cat((before.strength, self.strength)),
            decay=torch.cat((before.decay, self.decay)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaKept(Kept):
    """mixed [J,C]: rows as they enter the convolution; what they wrote; state [H,n,v] behind the last of them; w.

    state is None behind a branch, whose last row is not the last of the text.
    """

    mixed: Tensor
    written: Written
    state: Tensor | None
    conv: int


class DeltaMixer:
    """Convolution, recurrence and gated norm of one layer."""

    def __init__(self, weights: Source, prefix: str, sizes: DeltaSizes) -> None:
        c, take = sizes, weights.take
        self.sizes = sizes
        values = c.value_heads * c.value
        parts = (
            {"qkv": c.channels, "z": values, "b": c.value_heads, "a": c.value_heads}
            if c.apart
            else {"qkvz": c.channels + values, "ba": 2 * c.value_heads}
        )
        self.into = [take(f"{prefix}in_proj_{name}.weight", width, c.hidden) for name, width in parts.items()]
        self.conv = take(f"{prefix}conv1d.weight", c.channels, 1, c.conv)
        self.step_bias = take(f"{prefix}dt_bias", c.value_heads)
        self.log_rate = take(f"{prefix}A_log", c.value_heads)
        self.norm = take(f"{prefix}norm.weight", c.value)
        self.out = take(f"{prefix}out_proj.weight", c.hidden, values)

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, DeltaKept]:
        """See reference.model.Attends; where a row stands is in the order of the rows, not in `positions`."""
        assert kept is None or isinstance(kept, DeltaKept)
        rows, wide = len(x), torch.promote_types(x.dtype, torch.float32)
        mixed, z, b, a = self._project(x)
        before = 0 if kept is None else len(kept.mixed)
        parents = _parents(sight, rows)
        all_mixed = mixed if kept is None else torch.cat((kept.mixed, mixed))
        q, written = self._written(self._convolved(all_mixed, _paths(sight, parents, before, self.sizes.conv)), b, a)
        all_written = written if kept is None else written.behind(kept.written)
        states = self._states(all_written, sight, parents, before, None if kept is None else kept.state)
        read = torch.stack([(states[i] * q[i][:, :, None]).sum(dim=1) for i in range(rows)])  # [m,H,v]
        normed = read * torch.rsqrt(read.pow(2).mean(dim=-1, keepdim=True) + self.sizes.eps)
        gated = (self.norm.to(wide) * normed * silu(z.to(wide))).to(x.dtype)
        state = states[-1] if sight.own is None else None
        return linear(gated.reshape(rows, -1), self.out), DeltaKept(
            mixed=all_mixed, written=all_written, state=state, conv=self.sizes.conv
        )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [m,h] -> mixed [m,C], z [m,H,v], b [m,H], a [m,H]."""
        c, rows = self.sizes, len(x)
        said = [linear(x, weight) for weight in self.into]
        if c.apart:
            return said[0], said[1].view(rows, c.value_heads, c.value), said[2], said[3]
        each = c.value_heads // c.key_heads
        parts = said[0].view(rows, c.key_heads, -1)
        q, k, v, z = torch.split(parts, [c.key, c.key, each * c.value, each * c.value], dim=-1)
        b, a = torch.split(said[1].view(rows, c.key_heads, -1), [each, each], dim=-1)
        mixed = torch.cat([part.reshape(rows, -1) for part in (q, k, v)], dim=-1)
        return mixed, z.reshape(rows, c.value_heads, c.value), b.reshape(rows, -1), a.reshape(rows, -1)

    def _convolved(self, mixed: Tensor, paths: Tensor) -> Tensor:
        """mixed [J,C], paths int64 [m,w] of rows of it, -1 for none -> [m,C]."""
        padded = torch.cat((mixed, torch.zeros_like(mixed[:1])))
        return silu((padded[paths] * self.conv[:, 0].T.to(mixed.dtype)).sum(dim=1))

    def _written(self, convolved: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Written]:
        """convolved [m,C] -> q [m,H,n] and what the rows write."""
        c, rows, wide = self.sizes, len(convolved), torch.promote_types(convolved.dtype, torch.float32)
        keys, values = c.key_heads * c.key, c.value_heads * c.value
        q, k, v = torch.split(convolved.to(wide), [keys, keys, values], dim=-1)
        each = c.value_heads // c.key_heads
        q, k = (_unit(part.view(rows, c.key_heads, c.key)).repeat_interleave(each, dim=1) for part in (q, k))
        rate = self.log_rate.to(wide).exp() * softplus(a.to(wide) + self.step_bias.to(wide))
        written = Written(
            keys=k, values=v.view(rows, c.value_heads, c.value), strength=b.to(wide).sigmoid(), decay=(-rate).exp()
        )
        return q * c.key**-0.5, written

    def _states(
        self, written: Written, sight: Sight, parents: list[int], before: int, last: Tensor | None
    ) -> list[Tensor]:
        """The matrices [H,n,v] behind each new row; `last`: behind the last kept one, where that is known."""
        c = self.sizes
        state = torch.zeros(c.value_heads, c.key, c.value).to(written.keys)
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


def _unit(x: Tensor) -> Tensor:
    """x [...,n] of length one."""
    return x * torch.rsqrt(x.pow(2).sum(dim=-1, keepdim=True) + EPS)


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
