"""The gpt-oss style pair: a target with sliding windows, sinks, biases and experts, and an EAGLE-3 head for it.

Attention is a Llama's with small biases and sinks beside it, every other layer of it in a window. Experts add little,
so that a head with the target's first attention, which has no window, and a small MLP agrees with it often. No matrix
product takes part. This module must not write files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cases import eagle3_weights, llama_weights
from cases.recipes import Eagle3Recipe, Noise, Pair, Weights

BIASED = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssRecipe(Eagle3Recipe):
    """A pair with a gpt-oss style target: windows in every other layer, sinks, biases, experts.

    window: rows that a row sees, itself among them. experts: all of them are chosen for every row, so that no near tie
    decides what a row is. expert_gain: what they add, against an MLP of the other pairs.
    """

    target_architecture: ClassVar[str] = "GptOssForCausalLM"
    target_type: ClassVar[str] = "gpt_oss"

    state_rms: float = 2.0
    window: int = 12
    experts: int = 2
    expert_gain: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOssRecipe(GptOssRecipe):
    """The same weights for half precision: SGLang makes gpt-oss layers in the dtype that the config names, whatever
    --dtype says."""

    dtype: str


def pair(noise: Noise, recipe: GptOssRecipe) -> Pair:
    """The head is made from the target's first layer, with an MLP as quiet as experts are."""
    llama = llama_weights.target(noise, recipe)
    quiet = "model.layers.0.mlp.down_proj.weight"
    first = llama | {quiet: np.float32(recipe.expert_gain) * llama[quiet]}
    return Pair(
        target=_target(noise, recipe, llama),
        target_config=config(recipe),
        draft=eagle3_weights.weights(noise, recipe, first),
        draft_config=llama_weights.config(recipe, layers=1, architecture=eagle3_weights.ARCHITECTURE)
        | eagle3_weights.config(recipe),
    )


def _target(noise: Noise, recipe: GptOssRecipe, llama: Weights) -> Weights:
    """`llama` with biases and sinks, and experts in the place of every MLP."""
    made = {name: value for name, value in llama.items() if ".mlp." not in name}
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}."
        for name in BIASED:
            width = len(made[f"{prefix}self_attn.{name}.weight"])
            made[f"{prefix}self_attn.{name}.bias"] = noise.draw(width, std=0.02)
        # SGLang keeps sinks in bfloat16, whatever it computes in: thirty-seconds lose nothing there.
        made[f"{prefix}self_attn.sinks"] = np.round(32 * noise.draw(recipe.heads, std=0.5)) / np.float32(32)
        made |= {f"{prefix}mlp.{name}": value for name, value in _experts(noise, recipe, first=layer == 0).items()}
    return made


def _experts(noise: Noise, recipe: GptOssRecipe, *, first: bool) -> Weights:
    h, i, e = recipe.hidden, recipe.intermediate, recipe.experts
    gain = recipe.expert_gain * recipe.mlp_gain * (1.0 if first else recipe.upper_gain)
    return {
        "router.weight": noise.draw(e, h, std=h**-0.5),
        "router.bias": noise.draw(e, std=0.1),
        "experts.gate_up_proj": noise.draw(e, h, 2 * i, std=h**-0.5),
        "experts.gate_up_proj_bias": noise.draw(e, 2 * i, std=0.05),
        "experts.down_proj": noise.draw(e, i, h, std=gain * i**-0.5),
        "experts.down_proj_bias": noise.draw(e, h, std=gain * 0.05),
    }


def config(recipe: GptOssRecipe) -> dict[str, Any]:
    """A gpt-oss config; its rotation is the plain one, where published ones are stretched."""
    kinds = ["full_attention", "sliding_attention"]
    half = {"torch_dtype": recipe.dtype} if isinstance(recipe, HalfOssRecipe) else {}
    return (
        llama_weights.config(recipe, layers=recipe.layers)
        | half
        | {
            "attention_bias": True,
            "num_local_experts": recipe.experts,
            "num_experts_per_tok": recipe.experts,
            "sliding_window": recipe.window,
            "layer_types": [kinds[layer % 2] for layer in range(recipe.layers)],
            "rope_scaling": {"rope_type": "default"},
            "swiglu_limit": 7.0,
        }
    )
