"""The chained MTP pair: a Step-3.5 style target without experts and sliding windows, and its MTP layers.

What is left is Llama arithmetic with three things more: norms whose weight is stored less one, a norm over each query
and key head, and a gate a head on what attention gives. SGLang builds its MTP layers for targets of 45 layers only
(docs/evidence/families.md), so the target has as many, all but the first of little weight. Each MTP layer is the
target's first layer behind norms and a projection that pass the token through and mix the handed-over state in, and has
a head of its own, a little beside the target's. This module must not import sglang, transformers or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cases import llama_weights
from cases.llama_weights import first_layer, head_norms, uneven
from cases.mtp_weights import MtpRecipe
from cases.recipes import Noise, Pair, Weights

ARCHITECTURE = "Step3p5ForCausalLM"
#: An index no layer has: a list of the layers with experts may not be empty.
_NOWHERE = "99"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecipe(MtpRecipe):
    """A Step-3.5 style target with MTP layers that read each other's output.

    norm_spread: how far the weights of head norms lie from their mean, relative to it. head_gain: how far an MTP
    layer's head lies from the target's.
    """

    dp_attention: ClassVar[tuple[str, ...]] = ()
    target_architecture: ClassVar[str] = "Step3p5ForCausalLM"
    target_type: ClassVar[str] = "step3p5"

    layers: int = 45
    upper_gain: float = 0.015  # forty-four upper layers disagree as much as the two of the other pairs
    hidden_gain: float = 0.07  # a layer gets what the layers before it did not agree about, too
    norm_spread: float = 0.1
    head_gain: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FiveStepLayersRecipe(StepRecipe):
    """The same with a fifth layer."""

    draft_layers: ClassVar[int] = 5


def pair(noise: Noise, recipe: StepRecipe) -> Pair:
    """As in `cases/mtp_weights`; the draft has an embedding and heads of its own."""

    def attention(_gain: float) -> Weights:
        """Norms that keep scores sharp, and gates that are half open on average."""
        norms = head_norms(noise, recipe, spread=recipe.norm_spread)
        return norms | {"self_attn.g_proj.weight": noise.draw(recipe.heads, recipe.hidden, std=recipe.hidden**-0.5)}

    made = target(noise, recipe, llama_weights.target(noise, recipe, own=attention))
    own = draft(noise, recipe, made)
    both = config(recipe, llama_weights.config(recipe, layers=recipe.layers, architecture=ARCHITECTURE))
    return Pair(target=stored(made | own), target_config=both, draft=stored(own), draft_config=both)


def target(noise: Noise, recipe: StepRecipe, made: Weights) -> Weights:
    """`made` with a final norm of its own, and attention that is as loud behind half-open gates as it was without."""
    loud = {name: 2 * value for name, value in made.items() if name.endswith("o_proj.weight")}
    return made | loud | {"model.norm.weight": uneven(noise, recipe.hidden)}


def draft(noise: Noise, recipe: StepRecipe, made: Weights) -> Weights:
    """`model.layers.<45 + i>.*` as published Step-3.5 checkpoints name them, and the embedding they read."""
    hidden = recipe.hidden
    own: Weights = {"model.embed_tokens.weight": made["model.embed_tokens.weight"]}
    for index in range(recipe.draft_layers):
        prefix = f"model.layers.{recipe.layers + index}."
        mix = noise.draw(hidden, hidden, std=recipe.hidden_gain * hidden**-0.5)
        beside = noise.draw(recipe.vocab, hidden, std=recipe.head_gain * recipe.logit_std * hidden**-0.5)
        beside[recipe.vocab - 2 :] = 0.0  # bos and eos, as in the target's head
        own[f"{prefix}eh_proj.weight"] = np.concatenate([np.eye(hidden, dtype=np.float32), mix], axis=1)
        own[f"{prefix}enorm.weight"] = np.ones(hidden, dtype=np.float32)
        own[f"{prefix}hnorm.weight"] = uneven(noise, hidden)
        own[f"{prefix}transformer.shared_head.norm.weight"] = made["model.norm.weight"]
        own[f"{prefix}transformer.shared_head.output.weight"] = made["lm_head.weight"] + beside
        own |= {prefix + name: value for name, value in first_layer(made).items()}
    return own


def stored(weights: Weights) -> Weights:
    """`weights` as they lie on disk: norms less one."""
    return {name: value - np.float32(1) if name.endswith("norm.weight") else value for name, value in weights.items()}


def config(recipe: StepRecipe, base: dict[str, Any]) -> dict[str, Any]:
    """A Step-3.5 config of the same sizes as the Llama config `base`; lists have an entry a layer, MTP layers too."""
    every = base["num_hidden_layers"] + recipe.draft_layers
    return base | {
        "architectures": [ARCHITECTURE],
        "model_type": "step3p5",
        "num_attention_groups": base["num_key_value_heads"],
        "num_nextn_predict_layers": recipe.draft_layers,
        "max_seq_len": base["max_position_embeddings"],
        "layer_types": ["full_attention"] * every,
        "rope_theta": [base["rope_theta"]] * every,
        "partial_rotary_factors": [1.0] * every,
        "rope_scaling": None,
        "yarn_only_types": [],
        "use_head_wise_attn_gate": True,
        "sliding_window": None,
        "attention_other_setting": None,
        "moe_layers_enum": _NOWHERE,
        "moe_num_experts": 1,
        "moe_top_k": 1,
        "moe_intermediate_size": base["intermediate_size"],
        "share_expert_dims": base["intermediate_size"],
        "swiglu_limits": [0.0] * every,
        "swiglu_limits_shared": [0.0] * every,
    }
