"""Grouped-query attention with what published families add to Llama's.

Sources: GQA (arXiv 2305.13245); query and key norms (arXiv 2302.05442, as Qwen3 has them); sinks as a
learned score a head (gpt-oss, after arXiv 2309.17453); an output gate a channel or a head (Qwen's Gated Attention,
arXiv 2505.06708). Which of them a family has is in its published config and weight names; see reference.families.

Shapes: m new rows, h hidden width, H query heads, G key/value heads, d head width, w rotated width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference.attention import Kept, KeyValues, Sight, attend
from reference.checkpoint import Config, Weights
from reference.model import linear, rms_norm
from reference.rotation import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of a layer's attention and what it has beyond Llama's.

    width: what it reads a row, h unless said. bias: of queries, keys and values; out_bias: of what it gives.
    normed: a norm over each query and key head. gated: an output gate a channel, stored behind each query head.
    head_gated: an output gate a head, of weights of its own.
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
    head_gated: bool = False
    width: int | None = None
    window: int | None = None
    sinks: bool = False

    @staticmethod
    def of(config: Config, rotation: Rotation, **more: Any) -> Heads:
        """Of a config's sizes. more: what the architecture adds."""
        own = {name: getattr(config, name) for name in ("hidden", "heads", "kv_heads", "head_dim", "eps")}
        return Heads(rotation=rotation, **own, **more)

    def seeing(self, window: int | None) -> Heads:
        """The same with another window."""
        return dataclasses.replace(self, window=window)


class GroupedAttention:
    """Attention of one layer; see Heads."""

    def __init__(self, weights: Weights, prefix: str, heads: Heads) -> None:
        c, take = heads, weights.take
        wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
        widths = {"q": wide * (2 if c.gated else 1), "k": narrow, "v": narrow}
        self.heads, read = heads, c.width or c.hidden
        self.weight = {part: take(f"{prefix}{part}_proj.weight", width, read) for part, width in widths.items()}
        self.bias = {
            part: take(f"{prefix}{part}_proj.bias", width) if c.bias else None for part, width in widths.items()
        }
        self.o = take(f"{prefix}o_proj.weight", c.hidden, wide)
        self.o_bias = take(f"{prefix}o_proj.bias", c.hidden) if c.out_bias else None
        self.q_norm = take(f"{prefix}q_norm.weight", c.head_dim) if c.normed else None
        self.k_norm = take(f"{prefix}k_norm.weight", c.head_dim) if c.normed else None
        self.sinks = take(f"{prefix}sinks", c.heads) if c.sinks else None
        self.window = c.window
        self.head_gate = take(f"{prefix}g_proj.weight", c.heads, read) if c.head_gated else None

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
        if self.head_gate is not None:
            mixed = mixed * linear(x, self.head_gate).sigmoid()[:, :, None]
        return linear(mixed.reshape(rows, -1), self.o, self.o_bias), held

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.heads.eps)
