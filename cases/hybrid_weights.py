"""The Qwen3-Next style pair: gated delta networks with gated attention between them, experts, and one MTP layer.

The Qwen3.5 style one has a dense MLP in their place, and the same projections in four parts.

The MTP layer is the target's first layer of attention behind norms and a projection that pass the token through and mix
the handed-over state in; layers with a recurrent state before and behind it are the disagreement. No matrix product
takes part. This module must not import sglang, transformers or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cases import llama_weights
from cases.recipes import Noise, Pair, Recipe, Weights

#: Every second layer is one of attention: the first that is, is the MTP layer too.
EVERY, FIRST = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRecipe(Recipe):
    """A Qwen3-Next style pair: recurrent states, and an MTP layer of attention.

    delta_*: heads and widths of the gated delta networks, and how many rows their convolution reads. delta_gain: what
    they add, against attention. experts: all of them are chosen for every row, so that no near tie decides what a row
    is. expert_gain: what they add, against the shared one.
    """

    target_architecture: ClassVar[str] = "Qwen3NextForCausalLM"
    target_type: ClassVar[str] = "qwen3_next"

    hidden: int = 144
    intermediate: int = 112
    layers: int = 5
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 64
    max_position: int = 640
    attention_gain: float = 1.0
    mlp_gain: float = 1.0
    upper_gain: float = 0.03
    hidden_gain: float = 0.03
    delta_key_heads: int = 2
    delta_value_heads: int = 8
    delta_key: int = 32
    delta_value: int = 16
    delta_conv: int = 4
    delta_gain: float = 0.15
    experts: int = 4
    expert_gain: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseHybridRecipe(HybridRecipe):
    """A Qwen3.5 style pair: dense MLPs, and projections of the gated delta networks apart."""

    target_architecture: ClassVar[str] = "Qwen3_5ForCausalLM"
    target_type: ClassVar[str] = "qwen3_5_text"

    experts: int = 0


def pair(noise: Noise, recipe: HybridRecipe) -> Pair:
    """SGLang takes the MTP layer out of the target's own folder."""
    r, both = recipe, config(recipe)
    target: Weights = {
        "model.embed_tokens.weight": noise.draw(r.vocab, r.hidden, std=1.0),
        "model.norm.weight": np.zeros(r.hidden, dtype=np.float32),
        "lm_head.weight": noise.draw(r.vocab, r.hidden, std=r.logit_std * r.hidden**-0.5),
    }
    target["lm_head.weight"][r.vocab - 2 :] = 0.0  # bos and eos: a logit of 0 is never the largest
    for index in range(r.layers):
        gain = 1.0 if index == FIRST else r.upper_gain
        own = _attention(noise, r, gain) if index % EVERY == FIRST else _delta(noise, r)
        layer = own | _mlp(noise, r, gain=gain)
        target |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    draft = _mtp(noise, r, target)
    return Pair(target=target | draft, target_config=both, draft=draft, draft_config=both)


def _delta(noise: Noise, recipe: HybridRecipe) -> Weights:
    """A layer that remembers some dozen rows: its decay is near one."""
    r, unit = recipe, recipe.hidden**-0.5
    keys, values = r.delta_key_heads * r.delta_key, r.delta_value_heads * r.delta_value
    part, heads = "linear_attn.", r.delta_value_heads
    into = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    if not r.experts:
        into = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return {
        **{f"{part}in_proj_{name}.weight": noise.draw(width, r.hidden, std=unit) for name, width in into.items()},
        f"{part}conv1d.weight": noise.draw(2 * keys + values, 1, r.delta_conv, std=0.5),
        f"{part}dt_bias": noise.draw(r.delta_value_heads, std=0.5),
        f"{part}A_log": noise.draw(r.delta_value_heads, std=0.5) - np.float32(3.0),
        f"{part}norm.weight": llama_weights.uneven(noise, r.delta_value),
        f"{part}out_proj.weight": noise.draw(r.hidden, values, std=r.delta_gain * values**-0.5),
    }


def _attention(noise: Noise, recipe: HybridRecipe, gain: float) -> Weights:
    """Head norms, stored less one, make scores as sharp as the recipe says; a gate a channel halves what comes out."""
    r, unit, part = recipe, recipe.hidden**-0.5, "self_attn."
    wide, narrow, sharp = r.heads * r.head_dim, r.kv_heads * r.head_dim, np.float32(r.score_std**0.5 - 1)
    return {
        f"{part}q_proj.weight": noise.draw(2 * wide, r.hidden, std=unit),
        f"{part}k_proj.weight": noise.draw(narrow, r.hidden, std=unit),
        f"{part}v_proj.weight": noise.draw(narrow, r.hidden, std=unit),
        f"{part}o_proj.weight": noise.draw(r.hidden, wide, std=2 * gain * r.attention_gain * wide**-0.5),
        f"{part}q_norm.weight": sharp + noise.draw(r.head_dim, std=0.1),
        f"{part}k_norm.weight": sharp + noise.draw(r.head_dim, std=0.1),
    }


def _mlp(noise: Noise, recipe: HybridRecipe, *, gain: float) -> Weights:
    """A shared expert behind a gate that halves it, routed experts that add little, and both norms of a layer."""
    r, unit = recipe, recipe.hidden**-0.5
    made: Weights = {
        "input_layernorm.weight": np.zeros(r.hidden, dtype=np.float32),
        "post_attention_layernorm.weight": np.zeros(r.hidden, dtype=np.float32),
    }
    shares = {"": gain}
    if r.experts:
        made["mlp.gate.weight"] = noise.draw(r.experts, r.hidden, std=unit)
        made["mlp.shared_expert_gate.weight"] = noise.draw(1, r.hidden, std=unit)
        shares = {"shared_expert.": 2 * gain} | {f"experts.{one}.": gain * r.expert_gain for one in range(r.experts)}
    for name, share in shares.items():
        made[f"mlp.{name}gate_proj.weight"] = noise.draw(r.intermediate, r.hidden, std=2 * unit)
        made[f"mlp.{name}up_proj.weight"] = noise.draw(r.intermediate, r.hidden, std=unit)
        down = share * r.mlp_gain * r.intermediate**-0.5
        made[f"mlp.{name}down_proj.weight"] = noise.draw(r.hidden, r.intermediate, std=down)
    return made


def _mtp(noise: Noise, recipe: HybridRecipe, target: Weights) -> Weights:
    """`mtp.*`, as published Qwen3-Next checkpoints name them; embedding and head are the target's."""
    mix = noise.draw(recipe.hidden, recipe.hidden, std=recipe.hidden_gain * recipe.hidden**-0.5)
    start = f"model.layers.{FIRST}."
    layer = {name.removeprefix(start): value for name, value in target.items() if name.startswith(start)}
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    return {
        "mtp.fc.weight": np.concatenate([np.eye(recipe.hidden, dtype=np.float32), mix], axis=1),
        **{f"{name}.weight": np.zeros(recipe.hidden, dtype=np.float32) for name in norms},
        **{f"mtp.layers.0.{name}": value for name, value in layer.items()},
    }


def config(recipe: HybridRecipe) -> dict[str, Any]:
    """A Qwen3-Next config, every layer of which is a mixture, or a Qwen3.5 one, of which none is."""
    r = recipe
    mixed = llama_weights.config(r, layers=r.layers) | {
        "full_attention_interval": EVERY,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": r.delta_conv,
        "linear_key_head_dim": r.delta_key,
        "linear_num_key_heads": r.delta_key_heads,
        "linear_num_value_heads": r.delta_value_heads,
        "linear_value_head_dim": r.delta_value,
    }
    if not r.experts:
        turns = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
        turns |= {"rope_theta": mixed.pop("rope_theta"), "partial_rotary_factor": mixed["partial_rotary_factor"]}
        return mixed | {"rope_parameters": turns, "attn_output_gate": True, "mtp_num_hidden_layers": 1}
    return mixed | {
        "intermediate_size": 2 * r.intermediate,  # of dense layers, of which there is none
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": r.intermediate,
        "shared_expert_intermediate_size": r.intermediate,
        "num_experts": r.experts,
        "num_experts_per_tok": r.experts,
        "norm_topk_prob": True,
        "use_sliding_window": False,
    }
