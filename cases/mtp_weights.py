"""Multi-layer MTP pairs: a MiMo-V2 style target with little that is optional switched on, and its MTP layers.

Dense layers, no sinks, no value scale, rotary over the whole head: what is left of a MiMo-V2 target is Llama
arithmetic, and sliding windows where a recipe has them. Each MTP layer is the target's own first layer behind norms and
a projection that pass the token through and mix the handed-over hidden state in, differently in every layer, so that
layers cannot be taken for each other. This module must not import sglang, transformers or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cases import llama_weights
from cases.llama_weights import first_layer, uneven
from cases.recipes import Noise, Pair, Recipe, Weights

ARCHITECTURE = "MiMoV2FlashForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpRecipe(Recipe):
    """A MiMo-V2 style target with MTP layers."""

    algorithm: ClassVar[str] = "MTP"
    dp_attention: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: in the checkpoint: the most steps a scenario may ask for
    draft_layers: ClassVar[int] = 4

    hidden_gain: float = 0.1  # every MTP layer gets it through a norm, and all of them must agree often enough


@dataclass(frozen=True, slots=True, kw_only=True)
class FiveLayersRecipe(MtpRecipe):
    """The same with a fifth layer."""

    draft_layers: ClassVar[int] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedRecipe(MtpRecipe):
    """The same with sliding windows, in the target's first and last layer and in every MTP layer.

    window: rows that a row sees beside itself.
    """

    window: int = 8


def pair(noise: Noise, recipe: MtpRecipe) -> Pair:
    """Both folders hold the MTP layers: SGLang's users name one folder for both sides."""
    target = llama_weights.target(noise, recipe)
    target["model.norm.weight"] = uneven(noise, recipe.hidden)
    draft = weights(noise, recipe, target)
    both = config(recipe, llama_weights.config(recipe, layers=recipe.layers, architecture=ARCHITECTURE))
    if isinstance(recipe, WindowedRecipe):
        sliding = [int(layer in (0, recipe.layers - 1)) for layer in range(recipe.layers)]
        both |= {"sliding_window_size": recipe.window, "hybrid_layer_pattern": sliding}
    return Pair(target=target | draft, target_config=both, draft=draft, draft_config=both)


def weights(noise: Noise, recipe: MtpRecipe, target: Weights) -> Weights:
    """`model.mtp.layers.<i>.*`, as published MiMo-V2 checkpoints name them; embedding and head are the target's."""
    made: Weights = {}
    hidden = recipe.hidden
    for index in range(recipe.draft_layers):
        prefix = f"model.mtp.layers.{index}."
        mix = noise.draw(hidden, hidden, std=recipe.hidden_gain * hidden**-0.5)
        made[f"{prefix}eh_proj.weight"] = np.concatenate([np.eye(hidden, dtype=np.float32), mix], axis=1)
        made[f"{prefix}enorm.weight"] = np.ones(hidden, dtype=np.float32)
        made[f"{prefix}hnorm.weight"] = uneven(noise, hidden)
        made[f"{prefix}final_layernorm.weight"] = target["model.norm.weight"]
        for name, value in first_layer(target).items():
            made[prefix + name.replace("post_attention_layernorm", "pre_mlp_layernorm")] = value
    return made


def config(recipe: MtpRecipe, base: dict[str, Any]) -> dict[str, Any]:
    """A MiMo-V2 config of the same sizes as the Llama config `base`."""
    layers, heads, groups = base["num_hidden_layers"], base["num_attention_heads"], base["num_key_value_heads"]
    return base | {
        "architectures": [ARCHITECTURE],
        "layernorm_epsilon": base["rms_norm_eps"],
        "hybrid_layer_pattern": [0] * layers,
        "moe_layer_freq": [0] * layers,
        "n_routed_experts": 1,
        "partial_rotary_factor": 1.0,
        "v_head_dim": base["head_dim"],
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": groups,
        "swa_head_dim": base["head_dim"],
        "swa_v_head_dim": base["head_dim"],
        "swa_rope_theta": base["rope_theta"],
        "sliding_window_size": -1,
        "add_swa_attention_sink_bias": False,
        "add_full_attention_sink_bias": False,
        "num_nextn_predict_layers": recipe.draft_layers,
    }
