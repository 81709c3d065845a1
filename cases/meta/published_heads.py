"""Next-token layers of published families put into random tiny checkpoints, and what Hugging Face's parts say of them.

Hugging Face has the join of token and state for families that store the layer behind the last one (`MtpLayer`). MiMo's,
Qwen's and ERNIE's are written out here a second way, from MiMo's published modelling code and from DeepSeek-V3's
equations 21 to 23; their decoder layers are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer

from cases.meta.published import HIDDEN, add_tensors, make_target, randomise

#: tokens int64 [T], states [T,h] -> what the layer says, [T,h]
Says = Callable[[Tensor, Tensor], Tensor]

#: By family: the next-token layer's prefix, its norms of token and state, its join and last norm, as published.
BESIDE = {
    "mimo": (
        "model.mtp_layers.0.",
        "model.mtp_layers.0.token_layernorm",
        "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.final_layernorm",
    ),
    "qwen3_moe": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "qwen3_5": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "qwen3_next": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "ernie": (
        "model.mtp_block.0.",
        "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
        "model.mtp_linear_proj.0",
        "model.norm",
    ),
}
#: Families that store it as one more layer of the target.
BEHIND = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


def make_pair(family: str, seed: int, folder: Path) -> tuple[PreTrainedModel, Says]:
    """A target with a next-token layer in one folder: Hugging Face's model, and its parts' word on the layer."""
    hf = make_target(family, seed, folder)
    return hf, (_behind if family in BEHIND else _beside)(hf, family, folder)


def _behind(hf: PreTrainedModel, family: str, folder: Path) -> Says:
    base, layers = hf.get_decoder(), hf.config.num_hidden_layers
    index = layers - 1 if getattr(hf.config, "mlp_layer_types", None) else layers  # a list of kinds ends there
    layer = _randomised(MtpLayer(hf.config, type(base.layers[-1]), type(base.norm), index))
    prefix = f"model.layers.{layers}."
    copies = {"embed_tokens": hf.get_input_embeddings(), "shared_head.head": hf.get_output_embeddings()}
    own = {f"{prefix}{name}.weight": one.weight.detach().clone() for name, one in copies.items()}
    add_tensors(folder, _published(layer, prefix) | own)

    @torch.no_grad()
    def says(tokens: Tensor, hidden: Tensor) -> Tensor:
        angles, mask, positions = _surroundings(hf, tokens)
        found: Tensor = layer(hf.get_input_embeddings()(tokens)[None], hidden[None], angles, mask, positions, None)
        return found[0]

    return says


def _beside(hf: PreTrainedModel, family: str, folder: Path) -> Says:
    prefix, *names = BESIDE[family]
    base, eps = hf.get_decoder(), hf.config.rms_norm_eps
    token_norm, state_norm, last_norm = (
        base.norm if name == "model.norm" else _randomised(type(base.norm)(HIDDEN, eps))
        for name in (names[0], names[1], names[3])
    )
    # of full attention, and in ERNIE with a dense MLP
    index = hf.config.layer_types.index("full_attention") if family in ("qwen3_next", "qwen3_5") else 0
    block = _randomised(type(base.layers[-1])(hf.config, index))
    join = torch.randn(HIDDEN, 2 * HIDDEN, dtype=torch.float64) / HIDDEN**0.5
    own = {names[0]: token_norm.weight, names[1]: state_norm.weight, names[2]: join, names[3]: last_norm.weight}
    own = {f"{name}.weight": value.detach().clone() for name, value in own.items() if name != "model.norm"}
    add_tensors(folder, _published(block, prefix) | own)

    @torch.no_grad()
    def says(tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = hf.get_input_embeddings()(tokens)
        if family == "mimo":  # the token of the first row counts as zeros, and the state comes first
            embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
            x = torch.cat((state_norm(hidden), token_norm(embedded)), dim=-1) @ join.T
        else:
            x = torch.cat((token_norm(embedded), state_norm(hidden)), dim=-1) @ join.T
        angles, mask, positions = _surroundings(hf, tokens)
        g = block(x[None], position_embeddings=angles, attention_mask=mask, position_ids=positions)
        said: Tensor = last_norm(g[0])
        return said

    return says


def _published(layer: nn.Module, prefix: str) -> dict[str, Tensor]:
    """A Hugging Face layer's tensors with experts one by one, as checkpoints have them."""
    named = {}
    for name, value in layer.state_dict().items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for e, one in enumerate(value):
                gate, up = one.chunk(2)
                named |= {f"mlp.experts.{e}.gate_proj.weight": gate, f"mlp.experts.{e}.up_proj.weight": up}
        elif name.endswith("mlp.experts.down_proj"):
            named |= {f"mlp.experts.{e}.down_proj.weight": one for e, one in enumerate(value)}
        else:
            named[name.replace("post_norm", "shared_head.norm").replace("mtp_block.", "")] = value
    return {f"{prefix}{name}": value.detach() for name, value in named.items()}


def _randomised(module: nn.Module) -> nn.Module:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        randomise(name, tensor.data)
    return module.double().eval()


def _surroundings(hf: PreTrainedModel, tokens: Tensor) -> tuple[object, Tensor, Tensor]:
    """What a Hugging Face decoder layer gets beside rows: angles, a causal mask and positions."""
    rows, positions = len(tokens), torch.arange(len(tokens))[None]
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    mask = torch.zeros(rows, rows, dtype=torch.float64).masked_fill(later, float("-inf"))[None, None]
    return hf.get_decoder().rotary_emb(hf.get_input_embeddings()(tokens)[None], positions), mask, positions
