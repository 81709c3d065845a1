"""The Nemotron-H style pair: Mamba-2 layers with attention without positions and plain MLPs between them.

All layers add little to the token itself, and so does the one of its EAGLE-1 head, a Llama's with numbers of its own:
what the two add is where they disagree. No matrix product takes part. This module must not import sglang, transformers
or torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cases import llama_weights
from cases.recipes import MambaRecipe, Noise, Pair, Weights

#: What SGLang's `chunk_size` of a prompt's kernel is here: shorter than prompts.
CHUNK = 32


def pair(noise: Noise, recipe: MambaRecipe) -> Pair:
    """The head's only layer is drawn as a Llama's first one is."""
    r = recipe
    target: Weights = {
        "backbone.embeddings.weight": noise.draw(r.vocab, r.hidden, std=1.0),
        "backbone.norm_f.weight": llama_weights.uneven(noise, r.hidden),
        "lm_head.weight": noise.draw(r.vocab, r.hidden, std=r.logit_std * r.hidden**-0.5),
    }
    target["lm_head.weight"][r.vocab - 2 :] = 0.0  # bos and eos: a logit of 0 is never the largest
    mixers = {"M": _mamba, "*": _attention, "-": _mlp}
    for index, kind in enumerate(r.pattern):
        start = f"backbone.layers.{index}."
        target[f"{start}norm.weight"] = np.ones(r.hidden, dtype=np.float32)
        target |= {f"{start}mixer.{name}": value for name, value in mixers[kind](noise, r).items()}
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


def config(recipe: MambaRecipe) -> dict[str, Any]:
    """As published Nemotron-H configs have it; SGLang knows the groups by two names, and needs both."""
    r = recipe
    shared = llama_weights.config(r, layers=len(r.pattern))
    without = ("hidden_act", "rms_norm_eps", "rope_theta", "num_hidden_layers")
    return {name: value for name, value in shared.items() if name not in without} | {
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
