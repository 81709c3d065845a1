"""Llama-shaped pairs: the target that all others are made from, its EAGLE-1 head, and the Qwen3 target.

No matrix product takes part, so thread counts and BLAS builds cannot change a bit. It must not write files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cases.recipes import Noise, Pair, Qwen3Recipe, Recipe, Weights

#: Norms of a target's first layer that an EAGLE-1 head has none of.
ABSENT = ("input_layernorm.weight", "q_norm.weight", "k_norm.weight")


def pair(noise: Noise, recipe: Recipe) -> Pair:
    """A Llama or a Qwen3 with an EAGLE-1 head."""
    made, first = target_of(noise, recipe)
    return Pair(
        target=made,
        target_config=config(recipe, layers=recipe.layers),
        draft=head(noise, recipe, first),
        draft_config=config(recipe, layers=1, architecture="LlamaForCausalLMEagle"),
    )


def target_of(noise: Noise, recipe: Recipe) -> tuple[Weights, Weights]:
    """A Llama or a Qwen3, and the same as a head takes its first layer."""
    if not isinstance(recipe, Qwen3Recipe):
        made = target(noise, recipe)
        return made, made
    made = target(
        noise, recipe, own=lambda _gain: _turning(noise, recipe) | head_norms(noise, recipe, spread=recipe.norm_spread)
    )
    return made, _norms_folded(recipe, made)


def layer(noise: Noise, recipe: Recipe, *, gain: float) -> Weights:
    """One Llama layer; `gain` scales what it adds to the residual stream."""
    r, unit = recipe, recipe.hidden**-0.5
    wide, narrow = r.heads * r.head_dim, r.kv_heads * r.head_dim
    sharp = r.score_std**0.5 * unit
    return {
        "self_attn.q_proj.weight": noise.draw(wide, r.hidden, std=sharp),
        "self_attn.k_proj.weight": noise.draw(narrow, r.hidden, std=sharp),
        "self_attn.v_proj.weight": noise.draw(narrow, r.hidden, std=unit),
        "self_attn.o_proj.weight": noise.draw(r.hidden, wide, std=gain * r.attention_gain * wide**-0.5),
        "mlp.gate_proj.weight": noise.draw(r.intermediate, r.hidden, std=2 * unit),
        "mlp.up_proj.weight": noise.draw(r.intermediate, r.hidden, std=unit),
        "mlp.down_proj.weight": noise.draw(r.hidden, r.intermediate, std=gain * r.mlp_gain * r.intermediate**-0.5),
        "input_layernorm.weight": np.ones(r.hidden, dtype=np.float32),
        "post_attention_layernorm.weight": np.ones(r.hidden, dtype=np.float32),
    }


def target(noise: Noise, recipe: Recipe, *, own: Callable[[float], Weights] = lambda _gain: {}) -> Weights:
    """own: what a layer of that gain has beside, or instead of, a Llama's."""
    weights: Weights = {
        "model.embed_tokens.weight": noise.draw(recipe.vocab, recipe.hidden, std=1.0),
        "model.norm.weight": np.ones(recipe.hidden, dtype=np.float32),
        "lm_head.weight": noise.draw(recipe.vocab, recipe.hidden, std=recipe.logit_std * recipe.hidden**-0.5),
    }
    weights["lm_head.weight"][recipe.vocab - 2 :] = 0.0  # bos and eos: a logit of 0 is never the largest
    for index in range(recipe.layers):
        gain = 1.0 if index == 0 else recipe.upper_gain
        made = layer(noise, recipe, gain=gain) | own(gain)
        weights |= {f"model.layers.{index}.{name}": value for name, value in made.items()}
    return weights


def uneven(noise: Noise, hidden: int) -> np.ndarray:
    """A norm's weight [h] around one: with ones alone, normed and un-normed states would look alike."""
    return np.abs(np.float32(1.0) + noise.draw(hidden, std=0.25))


def _turning(noise: Noise, recipe: Qwen3Recipe) -> Weights:
    """Query and key projections that turn a row and keep its length, each head in its own way.

    So the head norms divide by the same number in every row, and a draft without such norms can agree with the target.
    Rows of a Hadamard matrix in another order, and signs: no matrix product takes part.
    """
    if recipe.head_dim != recipe.hidden or recipe.hidden & (recipe.hidden - 1):
        raise ValueError(f"{recipe.name}: head_dim must equal hidden, a power of two; not {recipe.head_dim}")
    square = np.ones((1, 1), dtype=np.float32)
    while len(square) < recipe.hidden:
        square = np.block([[square, square], [square, -square]])
    size = np.float32((recipe.score_std / recipe.hidden) ** 0.5)

    def head() -> np.ndarray:
        order = np.argsort(noise.draw(recipe.hidden, std=1.0), kind="stable")
        turned: np.ndarray = square[order] * np.sign(noise.draw(recipe.hidden, std=1.0)) * size
        return turned

    return {
        "self_attn.q_proj.weight": np.concatenate([head() for _ in range(recipe.heads)]),
        "self_attn.k_proj.weight": np.concatenate([head() for _ in range(recipe.kv_heads)]),
    }


def head_norms(noise: Noise, recipe: Recipe, *, spread: float) -> Weights:
    """Norms that leave queries and keys as large as the projections made them, so that scores stay sharp."""
    size = np.float32(recipe.score_std**0.5)
    return {
        f"self_attn.{name}.weight": size * (1 + noise.draw(recipe.head_dim, std=spread))
        for name in ("q_norm", "k_norm")
    }


def _norms_folded(recipe: Qwen3Recipe, target: Weights) -> Weights:
    """The target with the first layer's head norms in its projections, for a draft layer that has no norms there."""
    folded = dict(target)
    for name, heads in (("q", recipe.heads), ("k", recipe.kv_heads)):
        prefix = f"model.layers.0.self_attn.{name}"
        weight = target[f"{prefix}_norm.weight"] / np.float32(recipe.score_std**0.5)
        folded[f"{prefix}_proj.weight"] = target[f"{prefix}_proj.weight"] * np.tile(weight, heads)[:, None]
    return folded


def head(noise: Noise, recipe: Recipe, target: Weights) -> Weights:
    """The target's first layer behind an fc that passes the token through and mixes the hidden state in.

    Scaling fc and down_proj by s and dividing q and k by s scales the output by s and changes nothing else.
    """
    scale = np.float32(recipe.draft_scale)
    mix = noise.draw(recipe.hidden, recipe.hidden, std=recipe.hidden_gain * recipe.hidden**-0.5)
    weights: Weights = {
        "fc.weight": np.concatenate([np.eye(recipe.hidden, dtype=np.float32), mix], axis=1) * scale,
        "fc.bias": noise.draw(recipe.hidden, std=0.05) * scale,
    }
    factor = {"self_attn.q_proj": 1 / scale, "self_attn.k_proj": 1 / scale, "mlp.down_proj": scale}
    for name, value in first_layer(target).items():
        if not name.endswith(ABSENT):
            weights[f"layers.0.{name}"] = value * np.float32(factor.get(name.removesuffix(".weight"), 1.0))
    return weights


def first_layer(target: Weights) -> Weights:
    """The tensors of the target's first layer, by their names in it."""
    start = "model.layers.0."
    return {name.removeprefix(start): value for name, value in target.items() if name.startswith(start)}


def config(recipe: Recipe, *, layers: int, architecture: str = "") -> dict[str, Any]:
    """An HF Llama config; without an architecture the target's. bos and eos, the last two ids, are never proposed."""
    return {
        "architectures": [architecture or recipe.target_architecture],
        "model_type": "llama" if architecture else recipe.target_type,
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": recipe.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": recipe.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": recipe.vocab - 2,
        "eos_token_id": recipe.vocab - 1,
        "torch_dtype": "float32",
        "use_cache": True,
    }
