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
class MtpRecipe(Recipe):
    """A MiMo-V2 style target with MTP layers (see cases.mtp_weights)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecipe(MtpRecipe):
    """A Step-3.5 style target with MTP layers that read each other's output (see cases.step_weights).

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRecipe(Recipe):
    """A DeepSeek-V3 style pair: latent attention, and a NextN layer with experts (see cases.mla_weights).

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRecipe(Recipe):
    """A Qwen3-Next style pair: recurrent states, and an MTP layer of attention (see cases.hybrid_weights).

    delta_*: heads and widths of the gated delta networks, and how many rows their convolution reads. delta_gain: what
    they add, against attention. experts: all of them are chosen for every row, so that no near tie decides what a row
    is. expert_gain: what they add, against the shared one.
    """

    target_architecture: ClassVar[str] = "Qwen3NextForCausalLM"
    target_type: ClassVar[str] = "qwen3_next"

    hidden: int = 144
    intermediate: int = 112
    layers: int = 5
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 64
    max_position: int = 640
    attention_gain: float = 1.0
    mlp_gain: float = 1.0
    upper_gain: float = 0.03
    hidden_gain: float = 0.03
    delta_key_heads: int = 2
    delta_value_heads: int = 8
    delta_key: int = 32
    delta_value: int = 16
    delta_conv: int = 4
    delta_gain: float = 0.15
    experts: int = 4
    expert_gain: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseHybridRecipe(HybridRecipe):
    """A Qwen3.5 style pair: dense MLPs, and projections of the gated delta networks apart."""

    target_architecture: ClassVar[str] = "Qwen3_5ForCausalLM"
    target_type: ClassVar[str] = "qwen3_5_text"

    experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaRecipe(Recipe):
    """A Nemotron-H style target with an EAGLE-1 head (see cases.mamba_weights).

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssRecipe(Eagle3Recipe):
    """A pair with a gpt-oss style target: windows in every other layer, sinks, biases, experts (see cases.oss_weights).

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecipe(Recipe):
    """A pair whose next token depends on the position alone (see cases.table_weights).

    flatter: the draft's logits are the target's times this.
    """

    vocab: int = 32
    layers: int = 2
    flatter: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRecipe(Recipe):
    """A byte-level Llama that was trained, with the EAGLE-1 head that was trained for it (see cases.trained_weights).

    Its fields say what lies there; no seed and no gain decides a byte of it. head: the folder of its draft.
    """

    head: ClassVar[str] = "eagle1"

    seed: int = 0
    vocab: int = 320
    hidden: int = 256
    intermediate: int = 640
    layers: int = 5
    head_dim: int = 64
    max_position: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedEagle3Recipe(TrainedRecipe):
    """The same target with its EAGLE-3 head."""

    algorithm: ClassVar[str] = "EAGLE3"
    head: ClassVar[str] = "eagle3"

    aux_layers: tuple[int, ...] = (0, 2, 3)
    draft_vocab: int = 128


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
