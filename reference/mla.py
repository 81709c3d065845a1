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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference.attention import Kept, KeyValues, Sight, attend
from reference.checkpoint import Config, Weights, a_pair, all_keys, built_here, of_architecture, read_json, sizes
from reference.mixtures import Mixture, read_deepseek_v2, read_sigmoid
from reference.model import DecoderLayer, PaperTarget, Target, linear, rms_norm
from reference.nextn import NextNHead, behind
from reference.rotation import plain_frequencies

ARCHITECTURE = "DeepseekV3ForCausalLM"
V2_ARCHITECTURE = "DeepseekV2ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """A stretched rotation: `factor` times the context the model was first trained for, `original` positions.

    fast, slow: rotations over the original context from which on a dimension is left alone, and up to which it is
    stretched by the whole factor. mscale, mscale_all: how much longer contexts sharpen attention, through the part with
    the position alone (less what comes through all) and through all of it.
    """

    factor: float
    original: int
    fast: float
    slow: float
    mscale: float
    mscale_all: float

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Yarn:
        """Of a config's `rope_scaling`."""
        return Yarn(
            factor=float(raw["factor"]),
            original=int(raw["original_max_position_embeddings"]),
            fast=float(raw["beta_fast"]),
            slow=float(raw["beta_slow"]),
            mscale=float(raw["mscale"]),
            mscale_all=float(raw["mscale_all_dim"]),
        )

    def frequencies(self, width: int, theta: float) -> Tensor:
        """float32 [width/2]: radians a position for each pair; between the two borders a linear blend."""
        plain = plain_frequencies(width, theta)

        def pair(rotations: float) -> float:
            return width * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(pair(self.fast)), 0), min(math.ceil(pair(self.slow)), width - 1)
        stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)

    @property
    def turned(self) -> float:
        """What a rotated pair is multiplied by."""
        return self._size(self.mscale) / self._size(self.mscale_all)

    @property
    def sharpening(self) -> float:
        """What the scores are multiplied by besides one over the root of their width."""
        return self._size(self.mscale_all) ** 2

    def _size(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(Config):
    """What latent attention adds to a Llama's config. q_rank: None where queries are made in one step."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rotated: int
    value: int
    yarn: Yarn | None


def rope_pairs(x: Tensor, positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> Tensor:
    """Rotate x [m,H,r] by positions [m]: neighbours (2i, 2i+1) are a pair, turned by position * frequencies[i]."""
    wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot hold an angle
    angle = positions[:, None] * frequencies.to(wide)
    turn = torch.polar(torch.full_like(angle, scale), angle)[:, None, :]
    pairs = torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class LatentAttention:
    """Equations 1 to 11 of DeepSeek-V3 section 2.1.1, a row's latent normed before it is used."""

    def __init__(self, weights: Weights, prefix: str, config: LatentConfig) -> None:
        c, take = config, weights.take
        self.config = config
        turn = c.yarn.frequencies if c.yarn else plain_frequencies
        self.frequencies = turn(c.rotated, c.rope_theta).to(weights.device)
        width = c.nope + c.rotated
        self.scale = width**-0.5 * (c.yarn.sharpening if c.yarn else 1.0)
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

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """See reference.model.Attends."""
        c, rows = self.config, x.shape[0]
        asking = x if c.q_rank is None else rms_norm(linear(x, self.q_down), self.q_norm, c.eps)
        q_nope, q_turned = torch.split(linear(asking, self.q).view(rows, c.heads, -1), [c.nope, c.rotated], dim=-1)
        latent, k_turned = torch.split(linear(x, self.kv_down), [c.kv_rank, c.rotated], dim=-1)
        up = linear(rms_norm(latent, self.kv_norm, c.eps), self.kv_up).view(rows, c.heads, -1)
        k_nope, v = torch.split(up, [c.nope, c.value], dim=-1)
        k_turned = self._turned(k_turned[:, None, :], positions).expand(-1, c.heads, -1)  # one for all heads
        q = torch.cat((q_nope, self._turned(q_turned, positions)), dim=-1)
        keys = torch.cat((k_nope, k_turned), dim=-1)
        held = KeyValues(keys=keys, values=v, positions=positions).behind(kept)
        mixed = attend(q, held, sight, scale=self.scale)
        return linear(mixed.reshape(rows, -1), self.o), held

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        yarn = self.config.yarn
        return rope_pairs(x, positions, self.frequencies, yarn.turned if yarn else 1.0)


def latent_layer(weights: Weights, prefix: str, config: LatentConfig, mixture: Mixture, layer: int) -> DecoderLayer:
    """Decoder layer number `layer`: latent attention, then a dense MLP or experts."""
    return DecoderLayer(
        input_norm=weights.take(f"{prefix}input_layernorm.weight", config.hidden),
        attention=LatentAttention(weights, f"{prefix}self_attn.", config),
        post_norm=weights.take(f"{prefix}post_attention_layernorm.weight", config.hidden),
        mlp=mixture.mlp(weights, prefix, layer),
        eps=config.eps,
    )


def read_latent(path: Path) -> tuple[LatentConfig, Mixture]:
    """Sizes and MLPs of a DeepSeek folder; CheckpointError if it is none, or asks for what is not built here."""
    file = Path(path) / "config.json"
    raw = read_json(file)
    architecture = of_architecture(file, raw, ARCHITECTURE, V2_ARCHITECTURE)
    scaling = raw.get("rope_scaling")
    wanted = {"hidden_act": "silu", "attention_bias": False, "rope_type": "yarn"}
    kind = scaling.get("rope_type", scaling.get("type")) if scaling else "yarn"
    built_here(file, {**wanted, **raw, "rope_type": kind}, wanted)  # what a config leaves out is as wanted
    with all_keys(file, "DeepSeek"):
        plain = sizes(raw)
        config = LatentConfig(
            **{name: getattr(plain, name) for name in Config.__slots__},
            q_rank=raw["q_lora_rank"],
            kv_rank=raw["kv_lora_rank"],
            nope=raw["qk_nope_head_dim"],
            rotated=raw["qk_rope_head_dim"],
            value=raw["v_head_dim"],
            yarn=Yarn.read(scaling) if scaling else None,
        )
        return config, (read_sigmoid if architecture == ARCHITECTURE else read_deepseek_v2)(raw)


def load_target(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    held: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> PaperTarget:
    """The main model of a DeepSeek folder; CheckpointError if it is not one that is built here."""
    config, mixture = read_latent(path)
    weights = Weights(path, held or dtype, device)
    stack = [latent_layer(weights, f"model.layers.{i}.", config, mixture, i) for i in range(config.layers)]
    return PaperTarget(weights, config, stack=stack).computing(dtype)


def load_head(path: Path, target: Target, *, held: torch.dtype | None = None) -> NextNHead:
    """The layer behind the last one of a DeepSeek folder; CheckpointError if there is none or it does not fit."""
    config, mixture = read_latent(path)
    a_pair(path, config, vocab=target.vocab, hidden=target.hidden, layers=target.layers)
    weights = Weights(path, held or target.dtype, target.device)
    layer = latent_layer(weights, f"model.layers.{config.layers}.", config, mixture, config.layers)
    return NextNHead(weights, behind(config.layers), layer, target, config.eps)
