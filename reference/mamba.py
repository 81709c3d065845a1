"""Mamba-2: a row adds the product of its key and value to a head's matrix, which fades a bit each row.

Written from Mamba-2 (arXiv 2405.21060) section 2 and its figure 6: h' = exp(dt A) h + dt B x^T, y = C h' + D x, with x,
B and C behind a short convolution along the text, dt = softplus(.. + bias), and a norm over groups of channels behind a
gate. A head's B and C are those of its group. Names of weights are those of published Nemotron-H checkpoints.

Shapes: m rows, h hidden width, H heads, G groups, n width of a state, v of a head, C = Hv + 2Gn channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from reference.experts import Source
from reference.model import linear
from reference.recurrence import RecurrentMixer, Written


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """H, G, n, v and w, and the h around them. eps: of the norm behind the heads."""

    hidden: int
    heads: int
    groups: int
    state: int
    head: int
    conv: int
    eps: float

    @property
    def width(self) -> int:
        """Hv."""
        return self.heads * self.head

    @property
    def channels(self) -> int:
        """C."""
        return self.width + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aside:
    """Gate z [m,Hv], and what makes a row's step dt [m,H]."""

    z: Tensor
    dt: Tensor


class MambaMixer(RecurrentMixer):
    """Convolution, recurrence and gated norm of one layer."""

    def __init__(self, weights: Source, prefix: str, sizes: MambaSizes) -> None:
        c, take = sizes, weights.take
        self.sizes = sizes
        self.into = take(f"{prefix}in_proj.weight", c.width + c.channels + c.heads, c.hidden)
        self.conv = take(f"{prefix}conv1d.weight", c.channels, 1, c.conv)
        self.conv_bias = take(f"{prefix}conv1d.bias", c.channels)
        self.step_bias = take(f"{prefix}dt_bias", c.heads)
        self.log_rate = take(f"{prefix}A_log", c.heads)
        self.skip = take(f"{prefix}D", c.heads)
        self.norm = take(f"{prefix}norm.weight", c.width)
        self.out = take(f"{prefix}out_proj.weight", c.hidden, c.width)

    def _project(self, x: Tensor) -> tuple[Tensor, _Aside]:
        """See RecurrentMixer."""
        c = self.sizes
        z, mixed, dt = torch.split(linear(x, self.into), [c.width, c.channels, c.heads], dim=-1)
        return mixed, _Aside(z=z, dt=dt)

    def _written(self, convolved: Tensor, aside: _Aside) -> tuple[Tensor, Written]:
        """See RecurrentMixer."""
        c, rows, wide = self.sizes, len(convolved), torch.promote_types(convolved.dtype, torch.float32)
        of_groups = c.groups * c.state
        x, b, read = torch.split(convolved.to(wide), [c.width, of_groups, of_groups], dim=-1)
        each = c.heads // c.groups
        b, read = (part.view(rows, c.groups, c.state).repeat_interleave(each, dim=1) for part in (b, read))
        step = softplus(aside.dt.to(wide) + self.step_bias.to(wide))
        written = Written(
            keys=b,
            values=x.view(rows, c.heads, c.head),
            strength=step,
            decay=(-self.log_rate.to(wide).exp() * step).exp(),
            corrects=False,
        )
        return read, written

    def _out(self, read: Tensor, written: Written, aside: _Aside, dtype: torch.dtype) -> Tensor:
        """See RecurrentMixer."""
        c, rows = self.sizes, len(read)
        said = (read + self.skip.to(read.dtype)[:, None] * written.values).view(rows, -1) * silu(aside.z.to(read.dtype))
        groups = said.view(rows, c.groups, -1)
        normed = groups * torch.rsqrt(groups.pow(2).mean(dim=-1, keepdim=True) + c.eps)
        return linear((self.norm.to(read.dtype) * normed.view(rows, -1)).to(dtype), self.out)
