"""An EAGLE-3 head made from the target it drafts for.

The layer's residual stream starts at the state handed over, not at the token, so its attention must bring the token
in: extra heads that see only their own row copy the normed embedding and take most of the state away. Beside them
sit the heads of the target's first layer, behind them its MLP, and after the target's last norm some rows of its
lm_head. No matrix product takes part. This module must not write files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cases import llama_weights
from cases.recipes import Eagle3Recipe, Noise, NormedRecipe, Pair, Weights

ARCHITECTURE = "LlamaForCausalLMEagle3"


def pair(noise: Noise, recipe: Eagle3Recipe) -> Pair:
    """A Llama or a Qwen3 with an EAGLE-3 head."""
    made, first = llama_weights.target_of(noise, recipe)
    return Pair(
        target=made,
        target_config=llama_weights.config(recipe, layers=recipe.layers),
        draft=weights(noise, recipe, first),
        draft_config=llama_weights.config(recipe, layers=1, architecture=ARCHITECTURE) | config(recipe),
    )


def _copiers(recipe: Eagle3Recipe) -> int:
    """Key/value heads that copy: as many as hold one value for each draft dimension."""
    return recipe.draft_hidden // recipe.head_dim


def _kv_heads(recipe: Eagle3Recipe) -> int:
    """Copiers and the target's own, and idle ones until transformers takes it: heads must divide the width."""
    group, count = recipe.heads // recipe.kv_heads, _copiers(recipe) + recipe.kv_heads
    return next(heads for heads in range(count, recipe.draft_hidden) if recipe.draft_hidden % (heads * group) == 0)


def _aux_count(recipe: Eagle3Recipe) -> int:
    return 3 if recipe.aux_layers is None else len(recipe.aux_layers)


def config(recipe: Eagle3Recipe) -> dict[str, Any]:
    """What the head's config.json says beside, or other than, its target's."""
    kv_heads, group = _kv_heads(recipe), recipe.heads // recipe.kv_heads
    own: dict[str, Any] = {
        "hidden_size": recipe.draft_hidden,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "draft_vocab_size": recipe.draft_vocab,
    }
    if recipe.draft_hidden != recipe.hidden:
        own["target_hidden_size"] = recipe.hidden
    if isinstance(recipe, NormedRecipe):
        own["norm_before_residual"] = True
    if recipe.aux_layers is not None:
        own["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(recipe.aux_layers),
        }
    return own


def _padded(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Zeros below and to the right, up to [rows, columns]."""
    return np.pad(matrix, ((0, rows - matrix.shape[0]), (0, columns - matrix.shape[1])))


def weights(noise: Noise, recipe: Eagle3Recipe, target: Weights) -> Weights:
    """Tensors by their published names; d2t int64 [V'] and t2d bool [V] where V' is smaller than V."""
    r, h = recipe, recipe.draft_hidden
    ids = _vocabulary(noise, recipe)
    aux = _aux_count(recipe) * r.hidden
    # A norm over more dimensions of which the added ones are small sees a smaller mean square.
    level = np.full(h, (r.hidden / h) ** 0.5, dtype=np.float32)
    found: Weights = {
        # As large as the layer's own output, for features of about the same size.
        "fc.weight": noise.draw(h, aux, std=aux**-0.5),
        "midlayer.hidden_norm.weight": np.ones(h, dtype=np.float32),
        "midlayer.input_layernorm.weight": level,
        "midlayer.post_attention_layernorm.weight": level,
        "norm.weight": level,
        "lm_head.weight": _padded(target["lm_head.weight"][ids], r.draft_vocab, h),
    }
    if r.draft_vocab != r.vocab:
        found |= {"d2t": ids - np.arange(r.draft_vocab), "t2d": np.isin(np.arange(r.vocab), ids)}
    found |= {f"midlayer.self_attn.{name}.weight": value for name, value in _attention(noise, recipe, target).items()}
    shapes = {"gate_proj": (r.intermediate, h), "up_proj": (r.intermediate, h), "down_proj": (h, r.intermediate)}
    for name, shape in shapes.items():
        found[f"midlayer.mlp.{name}.weight"] = _padded(target[f"model.layers.0.mlp.{name}.weight"], *shape)
    if h != r.hidden:
        found["embed_tokens.weight"] = _padded(target["model.embed_tokens.weight"], r.vocab, h)
    return found


def _vocabulary(noise: Noise, recipe: Eagle3Recipe) -> np.ndarray:
    """The target ids it can propose, ascending: a random choice, int64 [V']."""
    order = np.argsort(noise.draw(recipe.vocab, std=1.0), kind="stable")
    return np.sort(order[: recipe.draft_vocab]).astype(np.int64)


def _attention(noise: Noise, recipe: Eagle3Recipe, target: Weights) -> Weights:
    """q, k, v [.., 2h'] over (embedding, state) and o: copying heads first, then the target's first layer's."""
    r, h, copiers, group = recipe, recipe.draft_hidden, _copiers(recipe), recipe.heads // recipe.kv_heads
    size = copiers * r.head_dim
    # |k|^2 / sqrt(d) = self_score, for an embedding of unit RMS over the target's width
    keys = noise.draw(copiers, r.head_dim, r.hidden, std=(r.self_score / (r.head_dim**0.5 * r.hidden)) ** 0.5)
    queries = np.repeat(keys, group, axis=0)
    token = np.eye(size, h, dtype=np.float32)
    state = np.eye(size, h, dtype=np.float32) * np.float32((r.state_gain - 1.0) * r.state_rms)
    back = np.zeros((h, copiers * group * r.head_dim), dtype=np.float32)
    for number in range(copiers):  # the first query head of each group brings the copy back
        rows = slice(number * r.head_dim, (number + 1) * r.head_dim)
        first = number * group * r.head_dim
        back[rows, first : first + r.head_dim] = np.eye(r.head_dim, dtype=np.float32)
    own = {name: target[f"model.layers.0.self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    narrow = _kv_heads(recipe) * r.head_dim
    wide = narrow * group

    def stacked(first: np.ndarray, second: np.ndarray, rows: int) -> np.ndarray:
        """One above the other, each padded to what attention reads, then idle heads."""
        both = [_padded(matrix, len(matrix), 2 * h) for matrix in (first, second)]
        return _padded(np.concatenate(both), rows, 2 * h)

    return {
        "q_proj": stacked(queries.reshape(-1, r.hidden), own["q_proj"], wide),
        "k_proj": stacked(keys.reshape(size, r.hidden), own["k_proj"], narrow),
        "v_proj": stacked(np.concatenate([token, state], axis=1), own["v_proj"], narrow),
        "o_proj": _padded(np.concatenate([back, _padded(own["o_proj"], h, own["o_proj"].shape[1])], axis=1), h, wide),
    }
