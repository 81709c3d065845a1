"""Nemotron-H targets: one mixer a layer (Mamba-2, attention without positions, or an MLP), each behind a norm.

Written from Nemotron-H (arXiv 2504.03624) section 2, published configs and weight names: `hybrid_override_pattern` has
a letter a layer, and the MLP squares what its rectifier lets through. Mixtures of experts, and the next-token layer of
the newest ones, are not built here. This module must not compute a recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reference.attention import Kept, Sight
from reference.checkpoint import CheckpointError, Config, Weights, all_keys, of_architecture
from reference.experts import Source
from reference.heads import GroupedAttention, Heads
from reference.keys import Keys
from reference.mamba import MambaMixer, MambaSizes
from reference.model import Attends, PaperTarget, RowWise, linear, rms_norm
from reference.rotation import Rotation

ARCHITECTURE = "NemotronHForCausalLM"
#: What a letter of the pattern stands for, and what newer configs call it in a list of their own.
MAMBA, ATTENTION, MLP = "M*-"
_KINDS = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION, "mlp": MLP}
#: Keys of what is not built, and the value that switches each off, or that the arithmetic has.
_ONLY = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
#: How weights are drawn before training, what is rounded to what, how a kernel cuts a text, and what experts are like,
#: of which no layer has any: nothing of a result.
_NOTHING = (
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual", "expand"),
    *("residual_in_fp32", "num_logits_to_keep", "chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels"),
    *("sliding_window", "num_hidden_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap"),
    *("n_group", "topk_group"),
)
#: Steps are not cut, as json has it and as transformers 5 writes it.
_UNCUT = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
#: What weights are called that other targets call otherwise.
_CALLED = {"model.embed_tokens.weight": "backbone.embeddings.weight", "model.norm.weight": "backbone.norm_f.weight"}


class _Weights(Weights):
    """By the names that other targets have; rates stay as they are stored."""

    def take(self, name: str, *shape: int) -> Tensor:
        """See Weights.take."""
        return super().take(_CALLED.get(name, name), *shape)

    def held(self, name: str, stored: Tensor) -> Tensor:
        """See Weights.held."""
        return stored if name.endswith("A_log") else super().held(name, stored)


class SquaredMlp:
    """down(relu(up x)^2)."""

    def __init__(self, weights: Source, prefix: str, *, hidden: int, width: int) -> None:
        self.up = weights.take(f"{prefix}up_proj.weight", width, hidden)
        self.down = weights.take(f"{prefix}down_proj.weight", hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """See reference.model.RowWise."""
        return linear(linear(x, self.up).relu().square(), self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerLayer:
    """A norm [h] and what comes behind it: something that sees other rows, or a row alone."""

    norm: Tensor
    eps: float
    attention: Attends | None = None
    mlp: RowWise | None = None

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """See reference.model.Layer."""
        read = rms_norm(x, self.norm, self.eps)
        if self.attention is not None:
            added, kept = self.attention.forward(read, positions, sight, kept)
            return x + added, kept
        assert self.mlp is not None
        return x + self.mlp.forward(read), Kept()


def load_target(path: Path, dtype: torch.dtype, *, held: torch.dtype, device: torch.device | str) -> PaperTarget:
    """The target of a Nemotron-H folder; CheckpointError if it is not one, or not one that is built here."""
    keys = Keys.read(path)
    with all_keys(keys.file, ARCHITECTURE):
        config, pattern, sizes = _read(keys)
        keys.all_claimed()
    weights = _Weights(path, held, device)
    stack = [_layer(weights, f"backbone.layers.{i}.", kind, config, sizes) for i, kind in enumerate(pattern)]
    target = PaperTarget(weights, config, stack=stack)
    weights.all_taken()
    return target.computing(dtype)


def _read(keys: Keys) -> tuple[Config, str, MambaSizes]:
    of_architecture(keys.file, keys, ARCHITECTURE)
    for key, only in _ONLY.items():
        keys.refuse(key, but=only)
    for key in _NOTHING:
        keys.get(key)
    if keys.get("time_step_limit", _UNCUT[0]) not in _UNCUT:
        raise CheckpointError(f"time_step_limit is {keys['time_step_limit']!r}; this reference builds only {_UNCUT[0]}")
    pattern, groups = _pattern(keys), keys["n_groups"]
    keys.refuse("mamba_n_groups", but=groups, why="expected n_groups, which SGLang calls so")
    config = Config(
        architecture=ARCHITECTURE,
        vocab=keys["vocab_size"],
        hidden=keys["hidden_size"],
        intermediate=keys["intermediate_size"],
        layers=len(pattern),
        heads=keys["num_attention_heads"],
        kv_heads=keys["num_key_value_heads"],
        head_dim=keys["head_dim"],
        eps=keys["layer_norm_epsilon"],
        rope_theta=1.0,
        tied=False,
    )
    sizes = MambaSizes(
        hidden=config.hidden,
        heads=keys["mamba_num_heads"],
        groups=groups,
        state=keys["ssm_state_size"],
        head=keys["mamba_head_dim"],
        conv=keys["conv_kernel"],
        eps=config.eps,
    )
    return config, pattern, sizes


def _pattern(keys: Keys) -> str:
    """A letter a layer; CheckpointError for one that is not built here."""
    listed = keys.get("layers_block_type")
    pattern = keys["hybrid_override_pattern"] if listed is None else "".join(_KINDS.get(one, "?") for one in listed)
    if set(pattern) - {MAMBA, ATTENTION, MLP}:
        raise CheckpointError(
            f"the layers are {listed or pattern!r}; this reference builds Mamba-2, attention and MLPs"
        )
    return pattern


def _layer(weights: Weights, prefix: str, kind: str, config: Config, sizes: MambaSizes) -> MixerLayer:
    attention: Attends | None = None
    if kind == MAMBA:
        attention = MambaMixer(weights, f"{prefix}mixer.", sizes)
    elif kind == ATTENTION:
        still = Rotation(frequencies=torch.zeros(config.head_dim // 2))
        attention = GroupedAttention(weights, f"{prefix}mixer.", Heads.of(config, still))
    mlp = (
        SquaredMlp(weights, f"{prefix}mixer.", hidden=config.hidden, width=config.intermediate) if kind == MLP else None
    )
    norm = weights.take(f"{prefix}norm.weight", config.hidden)
    return MixerLayer(norm=norm, eps=config.eps, attention=attention, mlp=mlp)
