"""Targets made of Llama's layers: which parts an architecture adds, and what its config says of each layer.

Written from Llama (arXiv 2302.13971), Mistral 7B (arXiv 2310.06825: a window in every layer), Qwen2 (arXiv 2407.10671:
biases of queries, keys and values) and Qwen3 (arXiv 2505.09388: norms over each query and key head), and their
published configs and weight names. A config that asks for what is not built here is a CheckpointError, and so is a key
that nobody reads. This module must not compute anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from reference.checkpoint import CheckpointError, Config, Weights, all_keys, of_architecture, sizes
from reference.experts import GatedMlp
from reference.heads import GroupedAttention, Heads
from reference.keys import Keys
from reference.model import DecoderLayer, PaperTarget
from reference.rotation import read_rotation


def heads_of(config: Config, keys: Keys, **more: bool) -> Heads:
    """A layer's attention: sizes and rotation of a config, and what the architecture adds (see Heads)."""
    keys.refuse("partial_rotary_factor", but=1.0, why="published models of this architecture turn whole heads")
    return Heads.of(config, read_rotation(keys, head_dim=config.head_dim), **more)


def _llama(config: Config, keys: Keys) -> Heads:
    biased = bool(keys.get("attention_bias", False))
    return heads_of(config, keys, bias=biased, out_bias=biased)


def _mistral(config: Config, keys: Keys) -> Heads:
    return heads_of(config, keys)


def _qwen2(config: Config, keys: Keys) -> Heads:
    keys.get("attention_bias")  # its biases are always there
    return heads_of(config, keys, bias=True)


def _qwen3(config: Config, keys: Keys) -> Heads:
    biased = bool(keys.get("attention_bias", False))
    return heads_of(config, keys, bias=biased, out_bias=biased, normed=True)


#: What an architecture's attention has.
ARCHITECTURES: dict[str, Callable[[Config, Keys], Heads]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def windows_of(config: Config, keys: Keys) -> list[int | None]:
    """How many rows a row of each layer sees, itself among them; None is all.

    `layer_types` says it where it is there; else Mistral's window is every layer's, and Qwen's the layers' from
    `max_window_layers` on, if `use_sliding_window`.
    """
    width, used, first = keys.get("sliding_window"), keys.get("use_sliding_window"), keys.get("max_window_layers")
    kinds = keys.get("layer_types")
    if kinds is not None:
        if len(kinds) != config.layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise CheckpointError(f"layer_types is {kinds!r}; expected full or sliding attention for each layer")
        if width is None and "sliding_attention" in kinds:
            raise CheckpointError("layer_types names sliding attention, and there is no sliding_window")
        return [width if kind == "sliding_attention" else None for kind in kinds]
    if config.architecture == "MistralForCausalLM":
        return [width] * config.layers
    if config.architecture.startswith("Qwen") and used and width is not None:
        return [width if i >= (first or 0) else None for i in range(config.layers)]
    if used or (used is None and width is not None and not config.architecture.startswith("Qwen")):
        raise CheckpointError(f"sliding_window is {width!r}; this reference builds it for Mistral and Qwen")
    return [None] * config.layers


def llama_layer(
    weights: Weights,
    prefix: str,
    heads: Heads,
    *,
    intermediate: int,
    input_norm: bool = True,
    first_norm: str = "input_layernorm",
    post_norm: str = "post_attention_layernorm",
    mlp_bias: bool = False,
) -> DecoderLayer:
    """A Llama layer. first_norm, post_norm: what its norms are called."""
    take, h = weights.take, heads.hidden
    return DecoderLayer(
        input_norm=take(f"{prefix}{first_norm}.weight", h) if input_norm else None,
        attention=GroupedAttention(weights, f"{prefix}self_attn.", heads),
        post_norm=take(f"{prefix}{post_norm}.weight", h),
        mlp=GatedMlp(weights, f"{prefix}mlp.", hidden=h, width=intermediate, bias=mlp_bias),
        eps=heads.eps,
    )


def load_target(path: Path, dtype: torch.dtype, *, held: torch.dtype, device: torch.device | str) -> PaperTarget:
    """Read a folder of one of the ARCHITECTURES; CheckpointError if it is none, or asks for what is not built here."""
    keys = Keys.read(path)
    architecture = of_architecture(keys.file, keys, *ARCHITECTURES)
    with all_keys(keys.file, architecture):
        config = sizes(keys)
        heads, windows = ARCHITECTURES[architecture](config, keys), windows_of(config, keys)
        keys.refuse("hidden_act", but="silu")
        mlp_bias = bool(keys.get("mlp_bias", False))
        keys.all_claimed()
    weights = Weights(path, held, device)
    stack = [
        llama_layer(
            weights, f"model.layers.{i}.", heads.seeing(windows[i]), intermediate=config.intermediate, mlp_bias=mlp_bias
        )
        for i in range(config.layers)
    ]
    target = PaperTarget(weights, config, stack=stack).computing(dtype)
    weights.all_taken(but=("lm_head.weight",) if config.tied else ())
    return target
