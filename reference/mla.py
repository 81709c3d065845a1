"""Multi-head latent attention: DeepSeek-V2 and V3 targets, and what else is made of their layers.

Written from DeepSeek-V2 (arXiv 2405.04434) sections 2.1 and 3.1.4, DeepSeek-V3 (arXiv 2412.19437) section 2.1, and YaRN
(arXiv 2309.00071) for the rotation, which published checkpoints stretch. Keys and values are made from one short latent
a row, and a key has a second part that carries the position and that all heads share; here both are multiplied out, as
the papers' equations stand, and nothing is absorbed into another matrix. Weights are named as published checkpoints
name them. This module must not know how anybody stores a latent.

Shapes: m new rows, h hidden width, H heads, c latent width, n and r width of a head's key without and with position, v
width of a head's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reference.attention import Kept, KeyValues, Sight, attend
from reference.checkpoint import Weights
from reference.indexer import Indexer
from reference.model import linear, rms_norm
from reference.rotation import Rotation, read_rotation, scaling_of, yarn_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of a layer's attention. q_rank: None where queries are made in one step. scale: of the scores."""

    hidden: int
    heads: int
    eps: float
    q_rank: int | None
    kv_rank: int
    nope: int
    rotated: int
    value: int
    rotation: Rotation
    scale: float

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Latent:
        """Of a config; a stretched rotation sharpens the scores by `mscale_all_dim`, and turned pairs by the rest."""
        nope, rotated = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
        scaling = scaling_of(raw)
        sharper = scaling.get("mscale_all_dim")
        size = yarn_size(float(scaling["factor"]), float(sharper)) if sharper else 1.0
        return Latent(
            hidden=raw["hidden_size"],
            heads=raw["num_attention_heads"],
            eps=raw["rms_norm_eps"],
            q_rank=raw.get("q_lora_rank"),
            kv_rank=raw["kv_lora_rank"],
            nope=nope,
            rotated=rotated,
            value=raw["v_head_dim"],
            rotation=read_rotation(raw, head_dim=rotated, interleaved=True),
            scale=(nope + rotated) ** -0.5 * size**2,
        )


class LatentAttention:
    """Equations 1 to 11 of DeepSeek-V3 section 2.1.1, a row's latent normed before it is used."""

    def __init__(self, weights: Weights, prefix: str, sizes: Latent) -> None:
        c, take = sizes, weights.take
        self.sizes, width = c, c.nope + c.rotated
        if c.q_rank is None:
            self.q = take(f"{prefix}q_proj.weight", c.heads * width, c.hidden)
        else:
            self.q_down = take(f"{prefix}q_a_proj.weight", c.q_rank, c.hidden)
            self.q_norm = take(f"{prefix}q_a_layernorm.weight", c.q_rank)
            self.q = take(f"{prefix}q_b_proj.weight", c.heads * width, c.q_rank)
        self.kv_down = take(f"{prefix}kv_a_proj_with_mqa.weight", c.kv_rank + c.rotated, c.hidden)
        self.kv_norm = take(f"{prefix}kv_a_layernorm.weight", c.kv_rank)
        self.kv_up = take(f"{prefix}kv_b_proj.weight", c.heads * (c.nope + c.value), c.kv_rank)
        self.o = take(f"{prefix}o_proj.weight", c.hidden, c.heads * c.value)

    def asking(self, x: Tensor) -> Tensor:
        """x [m,h] -> what queries are made of, [m,q_rank]; x itself where they are made in one step."""
        c = self.sizes
        return x if c.q_rank is None else rms_norm(linear(x, self.q_down), self.q_norm, c.eps)

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """See reference.model.Attends."""
        c, rows = self.sizes, x.shape[0]
        asked = linear(self.asking(x), self.q).view(rows, c.heads, -1)
        q_nope, q_turned = torch.split(asked, [c.nope, c.rotated], dim=-1)
        latent, k_turned = torch.split(linear(x, self.kv_down), [c.kv_rank, c.rotated], dim=-1)
        up = linear(rms_norm(latent, self.kv_norm, c.eps), self.kv_up).view(rows, c.heads, -1)
        k_nope, v = torch.split(up, [c.nope, c.value], dim=-1)
        q = torch.cat((q_nope, c.rotation.turn(q_turned, positions)), dim=-1)
        k_turned = c.rotation.turn(k_turned[:, None, :], positions).expand(-1, c.heads, -1)  # one for all heads
        held = KeyValues(keys=torch.cat((k_nope, k_turned), dim=-1), values=v, positions=positions).behind(kept)
        return linear(attend(q, held, sight, scale=c.scale).reshape(rows, -1), self.o), held


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseKept(Kept):
    """rows: what attention keeps. index: index keys [J,d]. chosen: bool [m,J] of the last forward's m rows."""

    rows: Kept
    index: Tensor
    chosen: Tensor


class SparseAttention:
    """A layer that attends the rows that its indexer chooses (DeepSeek-V3.2).

    shared: a next-token layer's steps attend what the last committed row before them chose, and so neither themselves
    nor each other (GLM-5.2's `index_share_for_mtp_iteration`, as vllm-project/vllm 44420 and sgl-project/sglang 29787
    describe it).
    """

    def __init__(self, attention: LatentAttention, indexer: Indexer, *, shared: bool = False) -> None:
        self.attention, self.indexer, self.shared = attention, indexer, shared

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """See reference.model.Attends."""
        assert kept is None or isinstance(kept, SparseKept)
        index = self.indexer.keys(x, positions)
        index = index if kept is None else torch.cat((kept.index, index))
        seen = sight.mask(slice(0, len(x)), len(index) - len(x))
        if self.shared and kept is not None:
            chosen = torch.nn.functional.pad(kept.chosen[sight.upto - 1], (0, len(x)))
        elif len(index) <= self.indexer.sizes.most:
            chosen = seen
        else:
            chosen = self.indexer.chosen(self.indexer.scores(x, self.attention.asking(x), positions, index), seen)
        before = None if kept is None else kept.rows
        added, rows = self.attention.forward(x, positions, replace(sight, only=chosen), before)
        return added, SparseKept(rows=rows, index=index, chosen=chosen)
