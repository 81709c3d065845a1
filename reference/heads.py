"""Grouped-query attention with what published families add to Llama's, and rotations of a part of a head.

Sources: RoPE (arXiv 2104.09864) with either way of pairing dimensions; YaRN (arXiv 2309.00071), whose temperature goes
into the rotated pairs; GQA (arXiv 2305.13245); query and key norms (arXiv 2302.05442, as Qwen3 has them); sinks as a
learned score a head (gpt-oss, after arXiv 2309.17453); an output gate a channel (Qwen's Gated Attention, arXiv
2505.06708). Which of them a family has is in its published config and weight names; see reference.families.

Shapes: m new rows, h hidden width, H query heads, G key/value heads, d head width, w rotated width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.attention import Kept, KeyValues, Sight, attend
from reference.checkpoint import Weights
from reference.model import linear, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Turns the first w dimensions of a head. frequencies: float32 [w/2], radians a position for each pair.

    interleaved: pairs are neighbours, not half the width apart. scale: what a turned pair is multiplied by.
    """

    frequencies: Tensor
    interleaved: bool = False
    scale: float = 1.0

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [m,H,d] by positions int64 [m]; never narrower than float32 inside."""
        wide = torch.promote_types(x.dtype, torch.float32)
        angle = positions[:, None] * self.frequencies.to(device=x.device, dtype=wide)
        cos, sin = (self.scale * angle.cos())[:, None, :], (self.scale * angle.sin())[:, None, :]
        width = 2 * angle.shape[-1]
        part, rest = x[..., :width].to(wide), x[..., width:]
        if self.interleaved:
            first, second = part[..., ::2], part[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        else:
            first, second = torch.chunk(part, 2, dim=-1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned.to(x.dtype), rest), dim=-1)


def plain_frequencies(width: int, theta: float) -> Tensor:
    """float32 [width/2]."""
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def yarn_frequencies(
    width: int, theta: float, *, factor: float, original: int, fast: float, slow: float, truncate: bool
) -> Tensor:
    """float32 [width/2]: stretched `factor` times beyond `original` positions.

    fast, slow: rotations over the original context from which on a dimension is left alone, and up to which it is
    stretched by the whole factor; between them a linear blend. truncate: whether the borders are whole dimensions.
    """
    plain = plain_frequencies(width, theta)

    def pair(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * stretched + plain * (1 - stretched)


def yarn_size(factor: float, mscale: float = 1.0) -> float:
    """How much longer contexts sharpen attention, as a factor of queries or keys: YaRN's 0.1 ln(s) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of a layer's attention and what it has beyond Llama's.

    normed: a norm over each query and key head. gated: an output gate a channel, stored behind each query head.
    window: a row sees that many rows, itself among them; None is all. sinks: a learned score a head.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rotation: Rotation
    bias: bool = False
    out_bias: bool = False
    normed: bool = False
    gated: bool = False
    window: int | None = None
    sinks: bool = False


class GroupedAttention:
    """Attention of one layer; see Heads."""

    def __init__(self, weights: Weights, prefix: str, heads: Heads) -> None:
        c, take = heads, weights.take
        wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
        widths = {"q": wide * (2 if c.gated else 1), "k": narrow, "v": narrow}
        self.heads = heads
        self.weight = {part: take(f"{prefix}{part}_proj.weight", width, c.hidden) for part, width in widths.items()}
        self.bias = {
            part: take(f"{prefix}{part}_proj.bias", width) if c.bias else None for part, width in widths.items()
        }
        self.o = take(f"{prefix}o_proj.weight", c.hidden, wide)
        self.o_bias = take(f"{prefix}o_proj.bias", c.hidden) if c.out_bias else None
        self.q_norm = take(f"{prefix}q_norm.weight", c.head_dim) if c.normed else None
        self.k_norm = take(f"{prefix}k_norm.weight", c.head_dim) if c.normed else None
        self.sinks = take(f"{prefix}sinks", c.heads) if c.sinks else None

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """See reference.model.Attends."""
        c, rows = self.heads, x.shape[0]
        q, k, v = (linear(x, self.weight[part], self.bias[part]) for part in "qkv")
        q, gate = torch.chunk(q.view(rows, c.heads, -1), 2, dim=-1) if c.gated else (q.view(rows, c.heads, -1), None)
        q = c.rotation.turn(self._normed(q, self.q_norm), positions)
        k = c.rotation.turn(self._normed(k.view(rows, c.kv_heads, -1), self.k_norm), positions)
        held = KeyValues(keys=k, values=v.view(rows, c.kv_heads, -1), positions=positions).behind(kept)
        mixed = attend(q, held, sight, scale=c.head_dim**-0.5, window=c.window, sinks=self.sinks)
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return linear(mixed.reshape(rows, -1), self.o, self.o_bias), held

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.heads.eps)
