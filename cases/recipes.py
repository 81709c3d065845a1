"""What decides the bytes of a tiny pair, and the numbers it is made from. Pure data; it must not write files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

Weights = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the bytes of a pair. Gains are relative to unit-RMS inputs.

    algorithm: what SGLang calls this kind of head. dp_attention: devices on which its target is driven under it.
    """

    algorithm: ClassVar[str] = "EAGLE"
    dp_attention: ClassVar[tuple[str, ...]] = ()
    target_architecture: ClassVar[str] = "LlamaForCausalLM"
    target_type: ClassVar[str] = "llama"

    name: str
    seed: int
    vocab: int = 512
    hidden: int = 64
    intermediate: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0  # the default everywhere, since releases disagree where the config keeps it
    max_position: int = 512
    score_std: float = 2.5  # standard deviation of attention scores: above ~2 a few tokens win
    attention_gain: float = 2.0  # size of the first layer's attention output against the token itself
    mlp_gain: float = 1.5
    upper_gain: float = 0.1  # target layers after the first: what the draft cannot know
    hidden_gain: float = 0.05  # how much the hidden state weighs that the draft it is handed
    draft_scale: float = 0.4  # brings the un-normed draft output to about unit RMS, where logits are not one-hot
    logit_std: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Recipe(Recipe):
    """A pair with an EAGLE-3 head. Its target is deeper, since features come from layers of their own.

    aux_layers: ids as the config names them, None for the default three. draft_vocab: tokens it can propose.
    """

    algorithm: ClassVar[str] = "EAGLE3"

    layers: int = 8
    upper_gain: float = 0.05  # seven upper layers disagree as much as the two of the other pairs
    aux_layers: tuple[int, ...] | None = None
    draft_hidden: int = 64
    draft_vocab: int = 432
    self_score: float = 14.0  # how sure the copying heads are of their own row: e^14 against a hundred others
    state_rms: float = 2.8  # what the layer's output is in size; fc matches it
    state_gain: float = 0.1  # share of the state that is left after the copying heads took it away


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedRecipe(Eagle3Recipe):
    """As heads whose config says norm_before_residual: the layer's residual starts at the normed state.

    Then the state is of size one wherever it goes, whatever the layer's output is in size.
    """

    state_rms: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Recipe(Eagle3Recipe):
    """A pair whose target can run under DP attention: a Qwen3, which is a Llama with normed query and key heads.

    norm_spread: how far the weights of those norms lie from their mean, relative to it. head_dim: the target's width,
    which lets a projection keep a row's length.
    """

    dp_attention: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    target_architecture: ClassVar[str] = "Qwen3ForCausalLM"
    target_type: ClassVar[str] = "qwen3"

    head_dim: int = 64
    norm_spread: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3EagleRecipe(Qwen3Recipe):
    """The same kind of target with an EAGLE-1 head, which is the target's first layer and has no width of its own."""

    algorithm: ClassVar[str] = "EAGLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What is written: a config.json and the tensors of each side."""

    target_config: dict[str, Any]
    target: Weights
    draft_config: dict[str, Any]
    draft: Weights


class Noise:
    """Normal-like numbers from raw PCG64 words: only exact integer and IEEE arithmetic, so portable bit for bit."""

    def __init__(self, seed: int) -> None:
        self._words = np.random.PCG64(seed)

    def draw(self, *shape: int, std: float) -> np.ndarray:
        """float32 `shape`, mean 0; the sum of four uniforms (Irwin-Hall) stands in for a normal."""
        count = int(np.prod(shape))
        uniform = (self._words.random_raw(4 * count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        quarters = uniform.reshape(4, count)
        total = ((quarters[0] + quarters[1]) + quarters[2]) + quarters[3]
        normal: np.ndarray = (total - 2.0) * (3.0**0.5 * std)
        return normal.astype(np.float32).reshape(shape)
