"""Gated delta networks: a row writes into a head's matrix what its value is beyond what the matrix knows of its key.

Written from Gated DeltaNet (arXiv 2412.06464) section 3: S' = a S (1 - b k k^T) + b v k^T, o = S' q, with q, k and v
behind a short convolution along the text and q and k of length one. How Qwen3-Next and Qwen3.5 lay their projections
out is from published configs, weight names and modelling code.

Shapes: m rows, h hidden width, H value heads, K key heads, n and v width of a key and value, C = 2Kn + Hv channels, w
width of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from reference.experts import Source
from reference.model import linear
from reference.recurrence import RecurrentMixer, Written

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
class _Aside:
    """Gate z [m,H,v], and what makes strength b [m,H] and decay a [m,H]."""

    z: Tensor
    b: Tensor
    a: Tensor


class DeltaMixer(RecurrentMixer):
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

    def _project(self, x: Tensor) -> tuple[Tensor, _Aside]:
        """See RecurrentMixer."""
        c, rows = self.sizes, len(x)
        said = [linear(x, weight) for weight in self.into]
        if c.apart:
            return said[0], _Aside(z=said[1].view(rows, c.value_heads, c.value), b=said[2], a=said[3])
        each = c.value_heads // c.key_heads
        parts = said[0].view(rows, c.key_heads, -1)
        q, k, v, z = torch.split(parts, [c.key, c.key, each * c.value, each * c.value], dim=-1)
        b, a = torch.split(said[1].view(rows, c.key_heads, -1), [each, each], dim=-1)
        mixed = torch.cat([part.reshape(rows, -1) for part in (q, k, v)], dim=-1)
        gate = z.reshape(rows, c.value_heads, c.value)
        return mixed, _Aside(z=gate, b=b.reshape(rows, -1), a=a.reshape(rows, -1))

    def _written(self, convolved: Tensor, aside: _Aside) -> tuple[Tensor, Written]:
        """See RecurrentMixer."""
        c, rows, wide = self.sizes, len(convolved), torch.promote_types(convolved.dtype, torch.float32)
        keys, values = c.key_heads * c.key, c.value_heads * c.value
        q, k, v = torch.split(convolved.to(wide), [keys, keys, values], dim=-1)
        each = c.value_heads // c.key_heads
        q, k = (_unit(part.view(rows, c.key_heads, c.key)).repeat_interleave(each, dim=1) for part in (q, k))
        rate = self.log_rate.to(wide).exp() * softplus(aside.a.to(wide) + self.step_bias.to(wide))
        written = Written(
            keys=k,
            values=v.view(rows, c.value_heads, c.value),
            strength=aside.b.to(wide).sigmoid(),
            decay=(-rate).exp(),
            corrects=True,
        )
        return q * c.key**-0.5, written

    def _out(self, read: Tensor, written: Written, aside: _Aside, dtype: torch.dtype) -> Tensor:
        """See RecurrentMixer."""
        normed = read * torch.rsqrt(read.pow(2).mean(dim=-1, keepdim=True) + self.sizes.eps)
        gated = (self.norm.to(read.dtype) * normed * silu(aside.z.to(read.dtype))).to(dtype)
        return linear(gated.reshape(len(read), -1), self.out)


def _unit(x: Tensor) -> Tensor:
    """x [...,n] of length one."""
    return x * torch.rsqrt(x.pow(2).sum(dim=-1, keepdim=True) + EPS)
