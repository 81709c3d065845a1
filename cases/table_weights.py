"""Weights of a pair whose distribution is known: the next token's distribution is looked up by position.

Tokens come in blocks, one a position modulo their number, and all tokens of a block share one embedding, so what a
model knows of a token is where it stands. Attention and MLP add nothing, so logits are one row of a table, exactly.
The draft reads the same table at another temperature: it proposes well, and its probabilities are wrong.

Pure arithmetic on given numbers; it must not draw anything and must not write files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cases import llama_weights
from cases.recipes import Noise, Pair, Recipe, Weights

#: Logits of a block's three tokens, by position modulo the table's length; none of the distributions is another's.
TABLE = (
    (0.0, -0.625, -1.5),
    (-0.25, 0.0, -2.0),
    (-1.125, -1.0, 0.0),
    (0.0, -1.75, -0.375),
    (-0.5, 0.0, -0.75),
    (0.0, -2.5, -2.25),
    (-1.375, -0.125, 0.0),
)
SYMBOLS = len(TABLE[0])
#: Logit of a token that does not stand at a position, less its id so that no two are the same: e^-60 is never drawn.
NEVER = -60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecipe(Recipe):
    """A pair whose next token depends on the position alone.

    flatter: the draft's logits are the target's times this.
    """

    vocab: int = 32
    layers: int = 2
    flatter: float = 0.5


def token_of(position: int, symbol: int) -> int:
    """The token that says `symbol` at `position`."""
    return SYMBOLS * (position % len(TABLE)) + symbol


def distribution(position: int, temperature: float) -> np.ndarray:
    """The distribution of the symbols at `position`, float64 [SYMBOLS]."""
    scaled = np.exp(np.asarray(TABLE[position % len(TABLE)]) / temperature)
    shares: np.ndarray = scaled / scaled.sum()
    return shares


def pair(noise: Noise, recipe: TableRecipe) -> Pair:
    made = llama_weights.pair(noise, recipe)
    return replace(made, target=target(recipe, made.target), draft=draft(recipe, made.draft))


def target(recipe: TableRecipe, weights: Weights) -> Weights:
    """The target of `recipe` with the table in its embedding and head, and nothing in between."""
    size = np.float32(recipe.hidden**0.5)  # a norm leaves one entry of this size
    embedding = np.zeros((recipe.vocab, recipe.hidden), dtype=np.float32)
    head = np.full((recipe.vocab, recipe.hidden), NEVER, dtype=np.float32) - np.arange(recipe.vocab)[:, None]
    for position, logits in enumerate(TABLE):
        for symbol, logit in enumerate(logits):
            token, before = token_of(position, symbol), (position - 1) % len(TABLE)
            embedding[token, position] = size
            head[token, before] = logit
    embedding[SYMBOLS * len(TABLE) :, len(TABLE)] = size  # tokens in no block
    silent = {name: np.zeros_like(value) for name, value in weights.items() if _adds(name)}
    own = {"model.embed_tokens.weight": embedding, "lm_head.weight": (head / size).astype(np.float32)}
    return {**weights, **silent, **own}


def draft(recipe: TableRecipe, weights: Weights) -> Weights:
    """The draft of `recipe`: the token passes through, scaled."""
    eye = np.eye(recipe.hidden, dtype=np.float32) * np.float32(recipe.flatter)
    silent = {name: np.zeros_like(value) for name, value in weights.items() if _adds(name)}
    mixed = np.concatenate([eye, np.zeros_like(eye)], axis=1)
    return {**weights, **silent, "fc.weight": mixed, "fc.bias": np.zeros(recipe.hidden, dtype=np.float32)}


def _adds(name: str) -> bool:
    """Whether the tensor decides what a layer adds to the residual stream."""
    return name.endswith(("o_proj.weight", "down_proj.weight"))
