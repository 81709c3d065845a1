"""Multi-token prediction with one layer a depth: the layers of MiMo-V2 and of Step-3.5, and their targets.

Written from DeepSeek-V3 (arXiv 2412.19437) section 2.2: the layer of depth i joins, at position j, a representation of
position j and the embedding of token j+1+i, each through a norm of its own, runs one decoder layer over that, and its
output speaks of token j+2+i. (Depths count from 0 here; reference.windows says which token that is when the text is not
known yet.) In the paper, and in Step-3.5, the representation is the output of the depth before, as it goes into the
head's norm; in MiMo-V2 it is the main model's for every depth. The embedding comes first in the join.

MiMo-V2: weights as published checkpoints name them, where nothing but Llama arithmetic and sliding windows is asked
for; embedding and head are the target's. A row of a layer with a window sees itself and `sliding_window_size` rows
before it; MTP layers all have one (Hugging Face's config of MiMo-V2-Flash, and its model card).

Step-3.5: from the published config and weight names of Step-3.5-Flash and the model card's words on head-wise gated
attention (each head's output times the sigmoid of a number that the layer's input gives that head, after Qwen's Gated
Attention, arXiv 2505.06708; see reference.model). Norms are stored less one, the main model's state is handed over
before its final norm too, and each depth has a norm, a head and an embedding of its own. Experts, clamps and the
windows of Step-3.5 are not built. This module must not look at a trace.

Shapes: T rows, h hidden width, V vocabulary, k layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from reference.attention import Kept, Sight
from reference.checkpoint import (
    CheckpointError,
    Config,
    DamagedError,
    Weights,
    a_pair,
    all_keys,
    built_here,
    of_architecture,
    read_json,
    sizes,
)
from reference.heads import Heads
from reference.llama import llama_layer
from reference.model import DecoderLayer, PaperTarget, Target, linear, on_target, rms_norm
from reference.rotation import Rotation, plain_frequencies

MIMO_ARCHITECTURE = "MiMoV2FlashForCausalLM"
STEP_ARCHITECTURE = "Step3p5ForCausalLM"
#: Rows that a row of each layer sees, itself among them; None: all.
Windows = list[int | None]
#: Parts of a MiMo-V2 target that are not Llama arithmetic, and the values that switch them off.
_OFF: dict[str, Any] = {
    "attention_value_scale": None,
    "partial_rotary_factor": 1.0,
    "add_swa_attention_sink_bias": False,
    "add_full_attention_sink_bias": False,
}


def read_mimo(path: Path) -> tuple[Config, Windows]:
    """A MiMo-V2 config whose arithmetic is Llama's, and its windows; CheckpointError if it asks for anything else."""
    file = Path(path) / "config.json"
    raw = read_json(file)
    of_architecture(file, raw, MIMO_ARCHITECTURE)
    plain = {"hidden_act": "silu", "attention_bias": False, "rope_scaling": None}
    built_here(file, plain | raw, plain)  # what a config leaves out is as wanted
    with all_keys(file, "MiMo-V2"):
        config = sizes(raw)
    wanted = _OFF | {
        "layernorm_epsilon": config.eps,
        "v_head_dim": config.head_dim,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.head_dim,
        "swa_num_attention_heads": config.heads,
        "swa_num_key_value_heads": config.kv_heads,
        "swa_rope_theta": config.rope_theta,
    }
    wanted["moe_layer_freq"] = [0] * config.layers
    built_here(file, raw, wanted)
    return config, _windows(file, raw, config.layers)


def _windows(file: Path, raw: Mapping[str, Any], layers: int) -> Windows:
    """The rows that a row sees, itself among them, layer by layer of the target; the last one is that of MTP layers."""
    size, pattern = raw.get("sliding_window_size"), raw.get("hybrid_layer_pattern")
    if size in (None, -1):
        built_here(file, raw, {"hybrid_layer_pattern": [0] * layers})
        return [None] * (layers + 1)
    if not isinstance(size, int) or size < 1 or not isinstance(pattern, list) or len(pattern) != layers:
        raise CheckpointError(
            f"{file}: sliding_window_size is {size!r} and hybrid_layer_pattern {pattern!r}\n"
            f"  allowed: a number of rows, and {layers} entries of 0 or 1"
        )
    return [size + 1 if sliding else None for sliding in (*pattern, 1)]


def mtp_layer(
    weights: Weights,
    prefix: str,
    config: Config,
    *,
    post_norm: str = "post_attention_layernorm",
    window: int | None = None,
) -> DecoderLayer:
    """A layer of a target, or of one depth."""
    gated = config.architecture == STEP_ARCHITECTURE
    rotation = Rotation(frequencies=plain_frequencies(config.head_dim, config.rope_theta))
    heads = Heads.of(config, rotation, normed=gated, head_gated=gated, window=window)
    return llama_layer(weights, prefix, heads, intermediate=config.intermediate, post_norm=post_norm)


def _stack(weights: Weights, config: Config, windows: Windows) -> list[DecoderLayer]:
    return [mtp_layer(weights, f"model.layers.{i}.", config, window=windows[i]) for i in range(config.layers)]


class MtpLayer:
    """One depth: two norms, a projection that joins them, a decoder layer, and a norm before the shared head."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: Config,
        target: Target,
        *,
        post_norm: str = "pre_mlp_layernorm",
        final: str = "final_layernorm",
        window: int | None = None,
    ) -> None:
        """post_norm, final: what the layer's second norm and the one before the head are called."""
        h = config.hidden
        self.target, self.eps = target, config.eps
        self.token_norm = weights.take(f"{prefix}enorm.weight", h)
        self.state_norm = weights.take(f"{prefix}hnorm.weight", h)
        self.join = weights.take(f"{prefix}eh_proj.weight", h, 2 * h)
        self.layer = mtp_layer(weights, prefix, config, post_norm=post_norm, window=window)
        self.final_norm = weights.take(f"{prefix}{final}.weight", h)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight | None = None, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """See Head.forward; g [m,h] before the final norm. Without a sight the rows are causal and nothing is kept."""
        token = rms_norm(self.embed(tokens).to(hidden.dtype), self.token_norm, self.eps)
        state = rms_norm(hidden, self.state_norm, self.eps)
        sight = sight or Sight.causal(len(tokens), device=hidden.device)
        return self.layer.forward(linear(torch.cat((token, state), dim=-1), self.join), positions, sight, kept)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [...,h]."""
        return self.target.embed(tokens)

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h] -> [...,V]."""
        return self.target.logits(rms_norm(g, self.final_norm, self.eps))


class MtpHead:
    """k layers behind one target. chained: a layer reads the output of the one before instead of the target's."""

    algorithm = "MTP"
    provider = "paper"
    notes: Sequence[str] = ()

    def __init__(self, layers: Sequence[MtpLayer], target: Target, *, chained: bool = False) -> None:
        self.layers, self.target, self.chained = tuple(layers), target, chained
        self.states: tuple[int, ...] = (target.layers,)

    @staticmethod
    def load(path: Path, target: Target, *, held: torch.dtype | None = None) -> MtpHead:
        """Every MTP layer in a MiMo-V2 folder; CheckpointError if there is none or it does not fit `target`."""
        config, windows = read_mimo(path)
        a_pair(path, config, vocab=target.vocab, hidden=target.hidden)
        weights, layers = Weights(path, held or target.dtype, target.device), list[MtpLayer]()
        while (prefix := f"model.mtp.layers.{len(layers)}.") + "eh_proj.weight" in weights:
            layers.append(MtpLayer(weights, prefix, config, target, window=windows[-1]))
        if not layers:
            raise DamagedError(f"{path}: has no tensor {prefix + 'eh_proj.weight'!r}; expected MTP layers from 0 on")
        return MtpHead(layers, target)

    def computing(self, dtype: torch.dtype) -> Self:
        """See Drafter.computing; its layers compute in the dtype of what they read."""
        return on_target(self, self.target.computing(dtype))

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """The target's last hidden state after its final norm, [T,h]."""
        return states[self.target.layers]


def load_mimo_target(path: Path, dtype: torch.dtype, *, held: torch.dtype, device: torch.device | str) -> PaperTarget:
    """The main model of a MiMo-V2 folder; CheckpointError if it is not one, or not one this reference builds."""
    config, windows = read_mimo(path)
    weights = Weights(path, held, device)
    return PaperTarget(weights, config, stack=_stack(weights, config, windows)).computing(dtype)


#: What lists with an entry a layer must say everywhere for what is built here.
_EVERYWHERE: dict[str, Any] = {
    "layer_types": "full_attention",
    "partial_rotary_factors": 1.0,
    "swiglu_limits_shared": 0.0,
}


def read_step(path: Path) -> Config:
    """A Step-3.5 config without experts and windows; CheckpointError if it asks for what is not built here."""
    file = Path(path) / "config.json"
    raw = read_json(file)
    of_architecture(file, raw, STEP_ARCHITECTURE)
    with all_keys(file, "Step-3.5"):
        layers = raw["num_hidden_layers"] + raw["num_nextn_predict_layers"]
        theta = raw["rope_theta"][0]
        own = {"num_key_value_heads": raw["num_attention_groups"], "head_dim": raw["head_dim"], "rope_theta": theta}
        config = sizes(raw | own | {"tie_word_embeddings": False})
    wanted = {"use_head_wise_attn_gate": True, "rope_theta": [theta] * layers, "yarn_only_types": []}
    wanted |= {name: [only] * layers for name, only in _EVERYWHERE.items()}
    built_here(file, raw, wanted)
    experts = {int(one) for one in raw.get("moe_layers_enum", "").split(",") if one}
    if experts & set(range(layers)):
        raise CheckpointError(
            f"{file}: moe_layers_enum names layers {sorted(experts)}; this reference builds no experts"
        )
    return config


class StepWeights(Weights):
    """As Weights, with norms as they are multiplied: what is stored is their weight less one."""

    def take(self, name: str, *shape: int) -> Tensor:
        """See Weights.take."""
        stored = super().take(name, *shape)
        return stored.float() + 1 if name.endswith("norm.weight") else stored  # half a sum would be rounded


class StepTarget(PaperTarget):
    """A target whose last state is handed over as it leaves the last layer; its logits take the final norm first."""

    def finished(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,h], before the final norm -> [...,V]."""
        return linear(rms_norm(hidden, self.norm, self.config.eps), self.head)


class StepLayer(MtpLayer):
    """One depth, stored as one more layer of the target, with an embedding and a head that are its own."""

    def __init__(self, weights: Weights, prefix: str, config: Config, target: Target, embed: Tensor) -> None:
        super().__init__(
            weights, prefix, config, target, post_norm="post_attention_layernorm", final="transformer.shared_head.norm"
        )
        self.embedding = embed
        self.head = weights.take(f"{prefix}transformer.shared_head.output.weight", config.vocab, config.hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [...,h], by its own embedding."""
        return embedding(tokens, self.embedding)

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h] -> [...,V], through its own head."""
        return linear(rms_norm(g, self.final_norm, self.eps), self.head)


def load_step_target(path: Path, dtype: torch.dtype, *, held: torch.dtype, device: torch.device | str) -> PaperTarget:
    """The main model of a Step-3.5 folder; CheckpointError if it is not one, or not one this reference builds."""
    config = read_step(path)
    weights = StepWeights(path, held, device)
    return StepTarget(weights, config, stack=_stack(weights, config, [None] * config.layers)).computing(dtype)


def load_step_head(path: Path, target: Target, *, held: torch.dtype | None = None) -> MtpHead:
    """Every MTP layer in a Step-3.5 folder, chained; CheckpointError if there is none or it does not fit `target`."""
    config = read_step(path)
    a_pair(path, config, vocab=target.vocab, hidden=target.hidden, layers=target.layers)
    weights, layers = StepWeights(path, held or target.dtype, target.device), list[MtpLayer]()
    embed = weights.take("model.embed_tokens.weight", config.vocab, config.hidden)
    while (prefix := f"model.layers.{config.layers + len(layers)}.") + "eh_proj.weight" in weights:
        layers.append(StepLayer(weights, prefix, config, target, embed))
    if not layers:
        raise DamagedError(
            f"{path}: has no tensor {prefix + 'eh_proj.weight'!r}; expected MTP layers behind the target's"
        )
    return MtpHead(layers, target, chained=True)
