"""Step-3.5 pairs: a target with gated attention and norms stored less one, and MTP layers that read each other.

Written from the published config and weight names of Step-3.5-Flash, the model card's words on head-wise gated
attention (each head's output times the sigmoid of a number that the layer's input gives that head, after Qwen's Gated
Attention, arXiv 2505.06708), and DeepSeek-V3 (arXiv 2412.19437) section 2.2 for the chain: depth i joins the token and
the output of depth i - 1, and that output is what goes into the head's norm, not what comes out of it. So the main
model's is handed over before its final norm too. MTP layers are stored behind the target's, each with a norm and a head
of its own, and with the embedding they read. Experts, sliding windows and clamps are not built. This module must not
look at a trace.

Shapes: T rows, h hidden width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from reference.checkpoint import (
    CheckpointError,
    Config,
    Weights,
    a_pair,
    all_keys,
    built_here,
    of_architecture,
    read_json,
)
from reference.model import STEP_ARCHITECTURE, Target, rms_norm
from reference.mtp import MtpHead, MtpLayer

ARCHITECTURE = STEP_ARCHITECTURE
#: What lists with an entry a layer must say everywhere for what is built here.
_EVERYWHERE: dict[str, Any] = {
    "layer_types": "full_attention",
    "partial_rotary_factors": 1.0,
    "swiglu_limits_shared": 0.0,
}


def read_config(path: Path) -> Config:
    """A Step-3.5 config without experts and windows; CheckpointError if it asks for what is not built here."""
    file = Path(path) / "config.json"
    raw = read_json(file)
    of_architecture(file, raw, ARCHITECTURE)
    with all_keys(file, "Step-3.5"):
        layers = raw["num_hidden_layers"] + raw["num_nextn_predict_layers"]
        theta = raw["rope_theta"][0]
        config = Config(
            architecture=ARCHITECTURE,
            vocab=raw["vocab_size"],
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_attention_groups"],
            head_dim=raw["head_dim"],
            eps=raw["rms_norm_eps"],
            rope_theta=float(theta),
            tied=False,
        )
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
        return stored + 1 if name.endswith("norm.weight") else stored


class StepTarget(Target):
    """A target whose last state is handed over as it leaves the last layer; its logits take the final norm first."""

    def hidden_states(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> list[Tensor]:
        """See Target.hidden_states; the last one is before the final norm."""
        return self.layer_outputs(tokens, positions, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,h], before the final norm -> [...,V]."""
        return linear(rms_norm(hidden, self.norm, self.config.eps), self.head)


class StepLayer(MtpLayer):
    """One depth, stored as one more layer of the target, with an embedding and a head that are its own."""

    def __init__(self, weights: Weights, prefix: str, config: Config, target: Target, embed: Tensor) -> None:
        super().__init__(
            weights, prefix, config, target, post_norm="post_attention_layernorm", final="transformer.shared_head.norm"
        )
        self.embed = embed
        self.head = weights.take(f"{prefix}transformer.shared_head.output.weight", config.vocab, config.hidden)

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h] -> [...,V], through its own head."""
        return linear(rms_norm(g, self.final_norm, self.eps), self.head)


def load_target(path: Path, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None) -> Target:
    """The main model of a Step-3.5 folder; CheckpointError if it is not one, or not one this reference builds."""
    config = read_config(path)
    return StepTarget(StepWeights(path, dtype, held), config)


def load_head(
    path: Path, target: Target, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None
) -> MtpHead:
    """Every MTP layer in a Step-3.5 folder, chained; CheckpointError if there is none or it does not fit `target`."""
    config = read_config(path)
    a_pair(path, config, target.config, layers=True)
    weights, layers = StepWeights(path, dtype, held), list[MtpLayer]()
    embed = weights.take("model.embed_tokens.weight", config.vocab, config.hidden)
    while (prefix := f"model.layers.{config.layers + len(layers)}.") + "eh_proj.weight" in weights:
        layers.append(StepLayer(weights, prefix, config, target, embed))
    if not layers:
        raise CheckpointError(
            f"{path}: has no tensor {prefix + 'eh_proj.weight'!r}; expected MTP layers behind the target's"
        )
    return MtpHead(layers, target, chained=True)
