"""Nemotron-H style pairs: Mamba-2 layers with attention without positions, plain MLPs and experts between them.

All layers add little to the token itself, and so does what drafts: an EAGLE-1 head with a Llama's layer of numbers of
its own, or a next-token layer, the target's own layers of attention and of experts behind norms and a projection that
mix the handed-over state in. What the two add is where they disagree. No matrix product takes part. This module must
not import sglang, transformers or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cases import llama_weights
from cases.recipes import Noise, Pair, Recipe, Weights

#: What SGLang's `chunk_size` of a prompt's kernel is here: shorter than prompts.
CHUNK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaRecipe(Recipe):
    """A Nemotron-H style target with an EAGLE-1 head.

    pattern: a letter a layer. mamba_*: heads, their width and groups, the width of a state, and how many rows the
    convolution reads. mamba_gain: what such a layer adds to the token itself.
    """

    target_architecture: ClassVar[str] = "NemotronHForCausalLM"
    target_type: ClassVar[str] = "nemotron_h"

    hidden: int = 120
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 64
    max_position: int = 640
    pattern: str = "M-*M-"
    attention_gain: float = 0.5
    mlp_gain: float = 0.06
    hidden_gain: float = 0.2
    logit_std: float = 4.0
    mamba_heads: int = 4
    mamba_head: int = 16
    mamba_groups: int = 2
    mamba_state: int = 32
    mamba_conv: int = 4
    mamba_gain: float = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMambaRecipe(MambaRecipe):
    """The same with a mixture of MLPs and a next-token layer of its own.

    experts: all of them are chosen for every row, so that no near tie decides what a row is. scaling: of their sum.
    """

    pattern: str = "M*EM-"
    next_pattern: str = "*E"
    experts: int = 5
    expert_width: int = 88
    scaling: float = 1.5
    expert_gain: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfMambaRecipe(NextMambaRecipe):
    """The same weights for half precision: SGLang makes `eh_proj` of the next-token layer in the config's dtype."""

    dtype: str


def pair(noise: Noise, recipe: MambaRecipe) -> Pair:
    """The head's only layer is drawn as a Llama's first one is; a next-token layer is in the target's folder, too."""
    r = recipe
    target: Weights = {
        "backbone.embeddings.weight": noise.draw(r.vocab, r.hidden, std=1.0),
        "backbone.norm_f.weight": llama_weights.uneven(noise, r.hidden),
        "lm_head.weight": noise.draw(r.vocab, r.hidden, std=r.logit_std * r.hidden**-0.5),
    }
    target["lm_head.weight"][r.vocab - 2 :] = 0.0  # bos and eos: a logit of 0 is never the largest
    mixers = {"M": _mamba, "*": _attention, "-": _mlp, "E": _experts}
    for index, kind in enumerate(r.pattern):
        start = f"backbone.layers.{index}."
        target[f"{start}norm.weight"] = np.ones(r.hidden, dtype=np.float32)
        target |= {f"{start}mixer.{name}": value for name, value in mixers[kind](noise, r).items()}
    if isinstance(r, NextMambaRecipe):
        draft, both = _next(noise, r, target), config(r)
        return Pair(target=target | draft, target_config=both, draft=draft, draft_config=both)
    layer = {f"model.layers.0.{name}": value for name, value in llama_weights.layer(noise, r, gain=1.0).items()}
    return Pair(
        target=target,
        target_config=config(recipe),
        draft=llama_weights.head(noise, recipe, layer),
        draft_config=llama_weights.config(recipe, layers=1, architecture="LlamaForCausalLMEagle"),
    )


def _mamba(noise: Noise, recipe: MambaRecipe) -> Weights:
    """A layer that remembers some dozen rows: steps of about a tenth, and rates of about one."""
    r = recipe
    width, groups = r.mamba_heads * r.mamba_head, 2 * r.mamba_groups * r.mamba_state
    return {
        "in_proj.weight": noise.draw(2 * width + groups + r.mamba_heads, r.hidden, std=r.hidden**-0.5),
        "conv1d.weight": noise.draw(width + groups, 1, r.mamba_conv, std=0.5),
        "conv1d.bias": noise.draw(width + groups, std=0.2),
        "dt_bias": noise.draw(r.mamba_heads, std=0.5) - np.float32(2.0),
        "A_log": noise.draw(r.mamba_heads, std=0.5),
        "D": np.float32(1.0) + noise.draw(r.mamba_heads, std=0.3),
        "norm.weight": llama_weights.uneven(noise, width),
        "out_proj.weight": noise.draw(r.hidden, width, std=r.mamba_gain * width**-0.5),
    }


def _attention(noise: Noise, recipe: MambaRecipe) -> Weights:
    r, unit = recipe, recipe.hidden**-0.5
    wide, narrow, sharp = r.heads * r.head_dim, r.kv_heads * r.head_dim, r.score_std**0.5 * recipe.hidden**-0.5
    return {
        "q_proj.weight": noise.draw(wide, r.hidden, std=sharp),
        "k_proj.weight": noise.draw(narrow, r.hidden, std=sharp),
        "v_proj.weight": noise.draw(narrow, r.hidden, std=unit),
        "o_proj.weight": noise.draw(r.hidden, wide, std=r.attention_gain * wide**-0.5),
    }


def _mlp(noise: Noise, recipe: MambaRecipe) -> Weights:
    r = recipe
    return {
        "up_proj.weight": noise.draw(r.intermediate, r.hidden, std=r.hidden**-0.5),
        "down_proj.weight": noise.draw(r.hidden, r.intermediate, std=r.mlp_gain * r.intermediate**-0.5),
    }


def _experts(noise: Noise, recipe: MambaRecipe) -> Weights:
    """A shared MLP, as others have it, and routed ones that add half as much in all."""
    assert isinstance(recipe, NextMambaRecipe), "the only one whose pattern has experts"
    r, unit = recipe, recipe.hidden**-0.5
    made: Weights = {
        "gate.weight": noise.draw(r.experts, r.hidden, std=unit),
        "gate.e_score_correction_bias": noise.draw(r.experts, std=0.1),
    }
    parts = {"shared_experts": (r.intermediate, r.mlp_gain)}
    parts |= {f"experts.{one}": (r.expert_width, r.expert_gain) for one in range(r.experts)}
    for name, (width, gain) in parts.items():
        made[f"{name}.up_proj.weight"] = noise.draw(width, r.hidden, std=unit)
        made[f"{name}.down_proj.weight"] = noise.draw(r.hidden, width, std=gain * width**-0.5)
    return made


def _next(noise: Noise, recipe: NextMambaRecipe, target: Weights) -> Weights:
    """`mtp.layers.*`, as published ones name them; embedding and head are the target's."""
    r, made, start = recipe, Weights(), "mtp.layers."
    mix = noise.draw(r.hidden, r.hidden, std=r.hidden_gain * r.hidden**-0.5)
    for number, kind in enumerate(r.next_pattern):
        own = f"backbone.layers.{r.pattern.index(kind)}."
        made |= {
            f"{start}{number}.{name.removeprefix(own)}": value for name, value in target.items() if name.startswith(own)
        }
    return made | {
        f"{start}0.eh_proj.weight": np.concatenate([np.eye(r.hidden, dtype=np.float32), mix], axis=1),
        f"{start}0.enorm.weight": np.ones(r.hidden, dtype=np.float32),
        f"{start}0.hnorm.weight": llama_weights.uneven(noise, r.hidden),
        f"{start}{len(r.next_pattern) - 1}.final_layernorm.weight": target["backbone.norm_f.weight"],
    }


def config(recipe: MambaRecipe) -> dict[str, Any]:
    """As published Nemotron-H configs have it; SGLang knows the groups by two names, and needs both."""
    r = recipe
    shared = llama_weights.config(r, layers=len(r.pattern))
    without = ("hidden_act", "rms_norm_eps", "rope_theta", "num_hidden_layers")
    mixed = {} if not isinstance(r, NextMambaRecipe) else _mixed(r)
    half = {"torch_dtype": r.dtype} if isinstance(r, HalfMambaRecipe) else {}
    return (
        {name: value for name, value in shared.items() if name not in without}
        | half
        | mixed
        | {
            "hybrid_override_pattern": r.pattern,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "mamba_num_heads": r.mamba_heads,
            "mamba_head_dim": r.mamba_head,
            "n_groups": r.mamba_groups,
            "mamba_n_groups": r.mamba_groups,
            "ssm_state_size": r.mamba_state,
            "conv_kernel": r.mamba_conv,
            "chunk_size": CHUNK,
            "use_bias": False,
            "use_conv_bias": True,
            "mamba_proj_bias": False,
        }
    )


def _mixed(recipe: NextMambaRecipe) -> dict[str, Any]:
    """Of experts and the next-token layer."""
    r = recipe
    return {
        "mtp_hybrid_override_pattern": r.next_pattern,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": r.experts,
        "num_experts_per_tok": r.experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": r.expert_width,
        "moe_shared_expert_intermediate_size": r.intermediate,
        "norm_topk_prob": True,
        "routed_scaling_factor": r.scaling,
        "n_group": 1,
        "topk_group": 1,
    }
