"""The DeepSeek-V3 style pair: a dense target with latent attention, and one NextN layer behind its last.

The NextN layer is the target's own first layer behind norms and a projection that pass the token through and mix the
handed-over state in; its shared expert is that layer's MLP, and what its routed experts add is the disagreement. This
module must not import sglang, transformers or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cases import llama_weights
from cases.llama_weights import first_layer, uneven
from cases.recipes import Noise, Pair, Recipe, Weights

#: What a Llama's attention has and this has not.
REPLACED = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRecipe(Recipe):
    """A DeepSeek-V3 style pair: latent attention, and a NextN layer with experts.

    q_rank, kv_rank: widths of the latents. nope, rotated, value: widths of a head's key without and with position, and
    of its value. stretch: how many times the first context the rotation covers. experts: all of them are chosen for
    every row, so that no near tie decides what a row is.
    expert_gain: what the routed experts add, which the target's first layer has nothing of.
    """

    dp_attention: ClassVar[tuple[str, ...]] = ("cuda",)
    target_architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    target_type: ClassVar[str] = "deepseek_v3"

    q_rank: int = 48
    kv_rank: int = 32
    nope: int = 32
    rotated: int = 16
    value: int = 32
    stretch: int = 4
    experts: int = 2
    scaling: float = 1.5
    expert_gain: float = 0.1


def pair(noise: Noise, recipe: LatentRecipe) -> Pair:
    """SGLang takes the NextN layer out of the target's own folder."""
    made = llama_weights.target(noise, recipe, own=lambda gain: attention(noise, recipe, gain=gain))
    target = {name: value for name, value in made.items() if not name.endswith(REPLACED)}
    target["model.norm.weight"] = uneven(noise, recipe.hidden)
    both = config(recipe, llama_weights.config(recipe, layers=recipe.layers))
    draft = nextn(noise, recipe, target)
    return Pair(target=target | draft, target_config=both, draft=draft, draft_config=both)


def attention(noise: Noise, recipe: LatentRecipe, *, gain: float) -> Weights:
    """One layer's attention; scores have the recipe's standard deviation, since latents are normed to size one."""
    r = recipe
    sharp, width = r.score_std**0.5, r.heads * r.value
    down = r.kv_rank + r.rotated
    latent = noise.draw(down, r.hidden, std=r.hidden**-0.5)
    latent[r.kv_rank :] *= np.float32(sharp)  # the part with the position goes into scores as it is
    up = noise.draw(r.heads, r.nope + r.value, r.kv_rank, std=r.kv_rank**-0.5)
    up[:, : r.nope] *= np.float32(sharp)
    query = r.heads * (r.nope + r.rotated)
    return {
        "self_attn.q_a_proj.weight": noise.draw(r.q_rank, r.hidden, std=r.hidden**-0.5),
        "self_attn.q_a_layernorm.weight": uneven(noise, r.q_rank),
        "self_attn.q_b_proj.weight": noise.draw(query, r.q_rank, std=sharp * r.q_rank**-0.5),
        "self_attn.kv_a_proj_with_mqa.weight": latent,
        "self_attn.kv_a_layernorm.weight": uneven(noise, r.kv_rank),
        "self_attn.kv_b_proj.weight": up.reshape(-1, r.kv_rank),
        "self_attn.o_proj.weight": noise.draw(r.hidden, width, std=gain * r.attention_gain * width**-0.5),
    }


def nextn(noise: Noise, recipe: LatentRecipe, target: Weights) -> Weights:
    """`model.layers.<L>.*`, as published DeepSeek-V3 checkpoints name them; embedding and head are the target's."""
    r, prefix = recipe, f"model.layers.{recipe.layers}."
    mix = noise.draw(r.hidden, r.hidden, std=r.hidden_gain * r.hidden**-0.5)
    made: Weights = {
        f"{prefix}eh_proj.weight": np.concatenate([np.eye(r.hidden, dtype=np.float32), mix], axis=1),
        f"{prefix}enorm.weight": np.ones(r.hidden, dtype=np.float32),
        f"{prefix}hnorm.weight": uneven(noise, r.hidden),
        f"{prefix}shared_head.norm.weight": target["model.norm.weight"],
        f"{prefix}embed_tokens.weight": target["model.embed_tokens.weight"],
        f"{prefix}shared_head.head.weight": target["lm_head.weight"],
        f"{prefix}mlp.gate.weight": noise.draw(r.experts, r.hidden, std=r.hidden**-0.5),
        f"{prefix}mlp.gate.e_score_correction_bias": noise.draw(r.experts, std=0.1),
    }
    for name, value in first_layer(target).items():
        made[prefix + name.replace("mlp.", "mlp.shared_experts.")] = value
    for expert in range(r.experts):
        gain, place = r.mlp_gain * r.expert_gain, f"{prefix}mlp.experts.{expert}."
        made[f"{place}gate_proj.weight"] = noise.draw(r.intermediate, r.hidden, std=2 * r.hidden**-0.5)
        made[f"{place}up_proj.weight"] = noise.draw(r.intermediate, r.hidden, std=r.hidden**-0.5)
        made[f"{place}down_proj.weight"] = noise.draw(r.hidden, r.intermediate, std=gain * r.intermediate**-0.5)
    return made


def config(recipe: LatentRecipe, base: dict[str, Any]) -> dict[str, Any]:
    """A DeepSeek-V3 config of the same sizes as the Llama config `base`, all layers of the target dense."""
    r = recipe
    own = {name: value for name, value in base.items() if name != "head_dim"}
    return own | {
        "model_type": r.target_type,
        "num_key_value_heads": r.heads,
        "q_lora_rank": r.q_rank,
        "kv_lora_rank": r.kv_rank,
        "qk_nope_head_dim": r.nope,
        "qk_rope_head_dim": r.rotated,
        "v_head_dim": r.value,
        "n_routed_experts": r.experts,
        "num_experts_per_tok": r.experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": r.intermediate,
        "moe_layer_freq": 1,
        "first_k_dense_replace": r.layers,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": r.scaling,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
        # As published: SGLang knows no other rotation for such a model on a CPU.
        "rope_scaling": {
            "type": "yarn",
            "factor": r.stretch,
            "original_max_position_embeddings": r.max_position // r.stretch,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
