"""Multi-head latent attention: a DeepSeek-V3 target and its next-token layer (NextN).

Written from DeepSeek-V2 (arXiv 2405.04434) sections 2.1 and 3.1.4, DeepSeek-V3 (arXiv 2412.19437) sections 2.1 and 2.2,
and YaRN (arXiv 2309.00071) for the rotation, which published checkpoints stretch. Keys and values are made from one
short latent a row, and a key has a second part that carries the position and that all heads share; here both are
multiplied out, as the papers' equations stand, and nothing is absorbed into another matrix.
Weights are named as published DeepSeek-V3 checkpoints name them; the layer behind the last one is the NextN layer.
This module must not know how anybody stores a latent.

Shapes: T rows, h hidden width, V vocabulary, H heads, c latent width, n and r width of a head's key without and with
position, v width of a head's value, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from reference.attention import Kept, KeyValues, Sight, attend
from reference.checkpoint import CheckpointError, Config, Weights, a_pair, all_keys, built_here, read_json
from reference.model import DecoderLayer, Mlp, PaperTarget, Target, linear, on_target, rms_norm

ARCHITECTURE = "DeepseekV3ForCausalLM"
#: What this reference leaves out of DeepSeek-V3, and the values that switch it off.
_OFF: dict[str, Any] = {"n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """A stretched rotation: `factor` times the context the model was first trained for, `original` positions.

    fast, slow: rotations over the original context from which on a dimension is left alone, and up to which it is
    stretched by the whole factor. mscale_all: how much longer contexts sharpen attention.
    """

    factor: float
    original: int
    fast: float
    slow: float
    mscale_all: float

    @staticmethod
    def read(file: Path, raw: dict[str, Any]) -> Yarn:
        """Of a config's `rope_scaling`; CheckpointError where cosines would be scaled too, which is not built here."""
        if raw.get("mscale") != raw.get("mscale_all_dim"):
            raise CheckpointError(
                f"{file}: mscale is {raw.get('mscale')!r}; this reference builds only mscale_all_dim's "
                f"{raw.get('mscale_all_dim')!r}"
            )
        return Yarn(
            factor=float(raw["factor"]),
            original=int(raw["original_max_position_embeddings"]),
            fast=float(raw["beta_fast"]),
            slow=float(raw["beta_slow"]),
            mscale_all=float(raw["mscale_all_dim"]),
        )

    def frequencies(self, width: int, theta: float) -> Tensor:
        """float32 [width/2]: radians a position for each pair; between the two borders a linear blend."""
        plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)

        def pair(rotations: float) -> float:
            return width * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(pair(self.fast)), 0), min(math.ceil(pair(self.slow)), width - 1)
        stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)

    @property
    def sharpening(self) -> float:
        """What the scores are multiplied by besides one over the root of their width."""
        return (0.1 * self.mscale_all * math.log(self.factor) + 1.0) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(Config):
    """What latent attention and the experts of the NextN layer add to a Llama's config."""

    q_rank: int
    kv_rank: int
    nope: int
    rotated: int
    value: int
    experts: int
    chosen: int
    expert_width: int
    shared: int
    scaling: float
    normed: bool
    yarn: Yarn

    @staticmethod
    def load(path: Path) -> LatentConfig:
        """Read `path`/config.json; CheckpointError if it is missing, foreign, or asks for what is not built here."""
        file = Path(path) / "config.json"
        raw = read_json(file)
        plain = Config.read(path, architecture=ARCHITECTURE, rotation="yarn")
        built_here(file, raw, _OFF | {"first_k_dense_replace": plain.layers, "num_nextn_predict_layers": 1})
        with all_keys(file, "DeepSeek-V3"):
            return LatentConfig(
                **{name: getattr(plain, name) for name in Config.__slots__},
                q_rank=raw["q_lora_rank"],
                kv_rank=raw["kv_lora_rank"],
                nope=raw["qk_nope_head_dim"],
                rotated=raw["qk_rope_head_dim"],
                value=raw["v_head_dim"],
                experts=raw["n_routed_experts"],
                chosen=raw["num_experts_per_tok"],
                expert_width=raw["moe_intermediate_size"],
                shared=raw["n_shared_experts"],
                scaling=float(raw["routed_scaling_factor"]),
                normed=raw["norm_topk_prob"],
                yarn=Yarn.read(file, raw["rope_scaling"]),
            )


def rope_pairs(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate x [T,H,r] by positions [T]: neighbours (2i, 2i+1) are a pair, turned by position * frequencies[i]."""
    wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot hold an angle
    angle = positions[:, None] * frequencies.to(wide)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None, :]
    pairs = torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class LatentAttention:
    """Equations 1 to 11 of DeepSeek-V3 section 2.1.1, a row's latent normed before it is used."""

    def __init__(self, weights: Weights, prefix: str, config: LatentConfig) -> None:
        c, take = config, weights.take
        self.config = config
        self.frequencies = c.yarn.frequencies(c.rotated, c.rope_theta).to(weights.device)
        self.q_down = take(f"{prefix}q_a_proj.weight", c.q_rank, c.hidden)
        self.q_norm = take(f"{prefix}q_a_layernorm.weight", c.q_rank)
        self.q_up = take(f"{prefix}q_b_proj.weight", c.heads * (c.nope + c.rotated), c.q_rank)
        self.kv_down = take(f"{prefix}kv_a_proj_with_mqa.weight", c.kv_rank + c.rotated, c.hidden)
        self.kv_norm = take(f"{prefix}kv_a_layernorm.weight", c.kv_rank)
        self.kv_up = take(f"{prefix}kv_b_proj.weight", c.heads * (c.nope + c.value), c.kv_rank)
        self.o = take(f"{prefix}o_proj.weight", c.hidden, c.heads * c.value)

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """x [m,h], positions int64 [m] -> what attention adds to the residual stream, [m,h], and all rows kept."""
        c, rows = self.config, x.shape[0]
        q = linear(rms_norm(linear(x, self.q_down), self.q_norm, c.eps), self.q_up).view(rows, c.heads, -1)
        q_nope, q_rotated = torch.split(q, [c.nope, c.rotated], dim=-1)
        latent, k_rotated = torch.split(linear(x, self.kv_down), [c.kv_rank, c.rotated], dim=-1)
        up = linear(rms_norm(latent, self.kv_norm, c.eps), self.kv_up).view(rows, c.heads, -1)
        k_nope, v = torch.split(up, [c.nope, c.value], dim=-1)
        q = torch.cat((q_nope, rope_pairs(q_rotated, positions, self.frequencies)), dim=-1)
        shared = rope_pairs(k_rotated[:, None, :], positions, self.frequencies).expand(-1, c.heads, -1)  # by all heads
        held = KeyValues(keys=torch.cat((k_nope, shared), dim=-1), values=v, positions=positions).behind(kept)
        mixed = attend(q, held, sight, scale=(c.nope + c.rotated) ** -0.5 * c.yarn.sharpening)
        return linear(mixed.reshape(rows, -1), self.o), held


class Experts:
    """DeepSeek-V3 section 2.1.2: sigmoid scores, the bias takes part in the choice only, shared experts always run."""

    def __init__(self, weights: Weights, prefix: str, config: LatentConfig) -> None:
        c = config
        self.config = config
        self.gate = weights.take(f"{prefix}gate.weight", c.experts, c.hidden)
        self.bias = weights.take(f"{prefix}gate.e_score_correction_bias", c.experts)
        self.shared = Mlp(weights, f"{prefix}shared_experts.", hidden=c.hidden, width=c.shared * c.expert_width)
        self.routed = [
            Mlp(weights, f"{prefix}experts.{e}.", hidden=c.hidden, width=c.expert_width) for e in range(c.experts)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]."""
        score = linear(x, self.gate).sigmoid()
        chosen = (score + self.bias).topk(self.config.chosen, dim=-1).indices
        share = score.gather(-1, chosen)
        if self.config.normed:
            share = share / share.sum(-1, keepdim=True)
        weight = torch.zeros_like(score).scatter(-1, chosen, share * self.config.scaling)
        routed = torch.stack([expert.forward(x) for expert in self.routed], dim=1)  # [T,E,h]
        return self.shared.forward(x) + torch.einsum("te,teh->th", weight, routed)


def latent_layer(weights: Weights, prefix: str, config: LatentConfig, *, experts: bool = False) -> DecoderLayer:
    """Latent attention, then a dense MLP or the experts."""
    c = config
    dense = None if experts else Mlp(weights, f"{prefix}mlp.", hidden=c.hidden, width=c.intermediate)
    return DecoderLayer(
        input_norm=weights.take(f"{prefix}input_layernorm.weight", c.hidden),
        attention=LatentAttention(weights, f"{prefix}self_attn.", c),
        post_norm=weights.take(f"{prefix}post_attention_layernorm.weight", c.hidden),
        mlp=dense or Experts(weights, f"{prefix}mlp.", c),
        eps=c.eps,
    )


def load_target(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    held: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> PaperTarget:
    """The main model of a DeepSeek-V3 folder, all layers dense; CheckpointError if it is not one that is built here."""
    config, weights = LatentConfig.load(path), Weights(path, held or dtype, device)
    stack = [latent_layer(weights, f"model.layers.{i}.", config) for i in range(config.layers)]
    return PaperTarget(weights, config, stack=stack).computing(dtype)


class NextNHead:
    """The layer behind the last one, run again and again: its own output is what its next row reads.

    Row j joins the token at j+1 and the state at j, each through a norm of its own, token first. Embedding and output
    head are the target's; the state it hands on is the one behind its own last norm, as the target's is.
    """

    algorithm = "EAGLE"
    provider = "paper"

    def __init__(self, weights: Weights, config: LatentConfig, target: Target) -> None:
        h, prefix = config.hidden, f"model.layers.{config.layers}."
        self.target, self.eps = target, config.eps
        self.states: tuple[int, ...] = (target.layers,)
        self.token_norm = weights.take(f"{prefix}enorm.weight", h)
        self.state_norm = weights.take(f"{prefix}hnorm.weight", h)
        self.join = weights.take(f"{prefix}eh_proj.weight", h, 2 * h)
        self.layer = latent_layer(weights, prefix, config, experts=True)
        self.final_norm = weights.take(f"{prefix}shared_head.norm.weight", h)

    @staticmethod
    def load(path: Path, target: Target, *, held: torch.dtype | None = None) -> NextNHead:
        """Read a folder with a NextN layer; CheckpointError if it is not one or does not fit `target`."""
        config = LatentConfig.load(path)
        a_pair(path, config, vocab=target.vocab, hidden=target.hidden, layers=target.layers)
        return NextNHead(Weights(path, held or target.dtype, target.device), config, target)

    def computing(self, dtype: torch.dtype) -> Self:
        """See Drafter.computing."""
        return on_target(self, self.target.computing(dtype))

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """The target's last hidden state after its final norm, [T,h]."""
        return states[self.target.layers]

    def enter(self, features: Tensor) -> Tensor:
        """As it is: the first draft row and all later ones read the same kind of state."""
        return features

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """See Head.forward; g [m,h]."""
        token = rms_norm(self.target.embed(tokens), self.token_norm, self.eps)
        state = rms_norm(hidden, self.state_norm, self.eps)
        x = linear(torch.cat((token, state), dim=-1), self.join)
        g, kept = self.layer.forward(x, positions, sight, kept)
        return rms_norm(g, self.final_norm, self.eps), kept

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h] -> [...,V], through the target's lm_head."""
        return self.target.logits(g)
