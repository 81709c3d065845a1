"""Published families that are not Llama's: which layers each has, from its config; and its next-token layer.

Written from published configs and weight names; the arithmetic is in reference.heads, mla, delta and experts. A config
that asks for what is not built here is a CheckpointError, and so is a key that nobody reads. This module must not
compute anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reference.checkpoint import CheckpointError, Weights, a_pair, all_keys, of_architecture
from reference.checkpoint import sizes as read_sizes
from reference.delta import DeltaMixer, DeltaSizes
from reference.experts import SWIGLU_ALPHA
from reference.family import Family
from reference.heads import GroupedAttention, Heads
from reference.indexer import Indexer, IndexSizes
from reference.keys import Keys
from reference.mixtures import (
    Mixture,
    dense,
    read_deepseek_v2,
    read_ernie,
    read_gpt_oss,
    read_mixtral,
    read_qwen,
    read_sigmoid,
)
from reference.mla import Latent, LatentAttention, SparseAttention
from reference.model import Attends, PaperTarget, Target
from reference.nextn import ERNIE, MIMO, QWEN, NextNHead, behind
from reference.rotation import Rotation, read_rotation, scaling_of

Raw = Mapping[str, Any]


def _share(raw: Raw, otherwise: float) -> float:
    """How much of each head turns."""
    found: float = raw.get("partial_rotary_factor") or scaling_of(raw).get("partial_rotary_factor") or otherwise
    return found


def _rotation(raw: Raw, *, share: float = 1.0, interleaved: bool = False) -> Rotation:
    """share: of the head that turns."""
    return read_rotation(raw, head_dim=read_sizes(raw).head_dim, share=share, interleaved=interleaved)


def _heads(raw: Raw, rotation: Rotation, **more: Any) -> Heads:
    return Heads.of(read_sizes(raw), rotation, **more)


def _same(heads: Heads) -> Callable[[Weights, str, int | None], Attends]:
    """Every layer's attention is of one kind."""
    return lambda weights, prefix, number: GroupedAttention(weights, f"{prefix}self_attn.", heads)


def _only(raw: Raw, wanted: Mapping[str, Any]) -> None:
    """Keys that may be left out or have this one value."""
    for key, only in wanted.items():
        if (found := raw.get(key, only)) != only:
            raise CheckpointError(f"{key} is {found!r}; this reference builds only {only!r}")


def _no_window(raw: Raw) -> None:
    for key in ("sliding_window", "max_window_layers"):
        raw.get(key)  # say nothing where no window is used
    _only(raw, {"use_sliding_window": False})
    kinds = set(raw.get("layer_types") or ()) - {"linear_attention"}
    if kinds - {"full_attention"}:
        raise CheckpointError(f"layer_types has {sorted(kinds)}; this reference builds only 'full_attention' here")


def _one_at_most(raw: Raw) -> None:
    """How many next-token layers there are."""
    if (count := raw.get("num_nextn_predict_layers", 0)) not in (0, 1):
        raise CheckpointError(f"num_nextn_predict_layers is {count}; this reference builds only one")


def read_mixtral_family(raw: Raw) -> Family:
    """Llama's attention; sliding_window is null in all published Mixtral checkpoints."""
    if raw.get("sliding_window"):
        raise CheckpointError(f"sliding_window is {raw['sliding_window']!r}; this reference builds only null here")
    return Family(config=read_sizes(raw), attention=_same(_heads(raw, _rotation(raw))), mixture=read_mixtral(raw))


def read_qwen2_moe(raw: Raw) -> Family:
    """Biases of queries, keys and values, whatever attention_bias says."""
    _no_window(raw)
    heads = _heads(raw, _rotation(raw), bias=bool(raw.get("qkv_bias", True)))
    return Family(config=read_sizes(raw), attention=_same(heads), mixture=read_qwen(raw))


def read_qwen3_moe(raw: Raw) -> Family:
    """Query and key norms; a next-token layer with names as Qwen3-Next has them."""
    _no_window(raw)
    biased = bool(raw.get("attention_bias", False))
    heads = _heads(raw, _rotation(raw), bias=biased, out_bias=biased, normed=True)
    mixture = read_qwen(raw)
    return Family(config=read_sizes(raw), attention=_same(heads), mixture=mixture, join=QWEN, draft="mtp.layers.0.")


def read_qwen3_5(raw: Raw) -> Family:
    """Qwen3-Next with dense MLPs and projections apart; a text's rows have one place in all three of its rotations."""
    scaling = scaling_of(raw)
    _only(raw, {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False})
    scaling.get("partial_rotary_factor")
    return _delta(raw, dense(raw), apart=True)


def read_qwen3_next(raw: Raw) -> Family:
    """Every layer a mixture."""
    return _delta(raw, read_qwen(raw))


def _delta(raw: Raw, mixture: Mixture, *, apart: bool = False) -> Family:
    """Gated delta networks, and gated attention in every full_attention_interval-th layer and the next-token layer."""
    _no_window(raw)
    config, every = read_sizes(raw), raw.get("full_attention_interval", 4)
    kinds = raw.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(config.layers)
    ]
    biased = bool(raw.get("attention_bias", False))
    rotation = _rotation(
        raw, share=raw.get("partial_rotary_factor") or scaling_of(raw).get("partial_rotary_factor", 0.25)
    )
    heads = _heads(raw, rotation, bias=biased, out_bias=biased, normed=True, gated=True)
    sizes = DeltaSizes(
        hidden=config.hidden,
        key_heads=raw["linear_num_key_heads"],
        value_heads=raw["linear_num_value_heads"],
        key=raw["linear_key_head_dim"],
        value=raw["linear_value_head_dim"],
        conv=raw["linear_conv_kernel_dim"],
        eps=config.eps,
        apart=apart,
    )

    def attention(weights: Weights, prefix: str, number: int | None) -> Attends:
        if number is not None and kinds[number] == "linear_attention":
            return DeltaMixer(weights, f"{prefix}linear_attn.", sizes)
        return GroupedAttention(weights, f"{prefix}self_attn.", heads)

    return Family(config=config, attention=attention, mixture=mixture, centred=True, join=QWEN, draft="mtp.layers.0.")


def read_glm(raw: Raw) -> Family:
    """GLM-4.5: half of each head turns; the next-token layer stands behind the last one."""
    config = read_sizes(raw)
    heads = _heads(
        raw,
        _rotation(raw, share=_share(raw, 0.5)),
        bias=bool(raw.get("attention_bias", False)),
        normed=bool(raw.get("use_qk_norm", False)),
    )
    return Family(
        config=config,
        attention=_same(heads),
        mixture=read_sigmoid(raw),
        join=behind(config.layers),
        draft=f"model.layers.{config.layers}.",
    )


def read_deepseek(raw: Raw) -> Family:
    """DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash: latent attention; the next-token layer stands behind the last one.

    Norms of latents have the config's eps. Hugging Face's classes write 1e-6 there, which is DeepSeek's value too.
    """
    config, latent = read_sizes(raw), Latent.read(raw)
    width = latent.nope + latent.rotated
    _only(raw, {"attention_bias": False, "rope_interleave": True, "ep_size": 1, "qk_head_dim": width})
    for place in (raw, scaling_of(raw)):
        _only(place, {"partial_rotary_factor": 1.0})
    second = config.architecture == "DeepseekV2ForCausalLM"
    return Family(
        config=config,
        attention=lambda weights, prefix, number: LatentAttention(weights, f"{prefix}self_attn.", latent),
        mixture=(read_deepseek_v2 if second else read_sigmoid)(raw),
        join=None if second else behind(config.layers),
        draft=f"model.layers.{config.layers}.",
    )


def read_deepseek_sparse(raw: Raw) -> Family:
    """DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): V3 whose layers attend what an indexer chooses."""
    family, latent, shared = read_deepseek(raw), Latent.read(raw), bool(raw.get("index_share_for_mtp_iteration"))
    if latent.q_rank is None:
        raise CheckpointError("q_lora_rank is null; an indexer makes its queries of the latent one")
    sizes = IndexSizes(
        hidden=latent.hidden,
        q_rank=latent.q_rank,
        heads=raw["index_n_heads"],
        width=raw["index_head_dim"],
        most=raw["index_topk"],
        rotation=read_rotation(raw, head_dim=latent.rotated),
    )
    return replace(
        family,
        attention=lambda weights, prefix, number: SparseAttention(
            LatentAttention(weights, f"{prefix}self_attn.", latent),
            Indexer(weights, f"{prefix}self_attn.indexer.", sizes),
            shared=shared and number is None,
        ),
    )


def read_mimo(raw: Raw) -> Family:
    """MiMo-7B: Qwen2's arithmetic."""
    _no_window(raw)
    if raw.get("use_mrope"):
        raise CheckpointError("use_mrope is true; this reference builds only false")
    heads = _heads(raw, _rotation(raw), bias=bool(raw.get("attention_bias", True)))
    return Family(
        config=read_sizes(raw), attention=_same(heads), mixture=dense(raw), join=MIMO, draft="model.mtp_layers.0."
    )


def read_ernie_family(raw: Raw) -> Family:
    """ERNIE 4.5: neighbours turn together; the next-token layer has a dense MLP."""
    _only(raw, {"use_bias": False, "moe_gate": "topk", "moe_use_aux_free": True, "moe_norm_min": 1e-12})
    _only(raw, {"compression_ratio": 1.0})
    for key in ("moe_capacity", "multi_token_pred_lambda"):
        raw.get(key)  # of training: how many rows an expert takes, how much the next-token layer's loss weighs
    config, mixture = read_sizes(raw), read_ernie(raw)
    heads = _heads(raw, _rotation(raw, interleaved=True))
    return Family(config=config, attention=_same(heads), mixture=mixture, join=ERNIE, draft="model.mtp_block.0.")


def read_gpt_oss_family(raw: Raw) -> Family:
    """Sinks, biases everywhere, and a window in every other layer."""
    config, rotation = read_sizes(raw), _rotation(raw)
    windows = {"sliding_attention": raw["sliding_window"], "full_attention": None}
    kinds = raw.get("layer_types") or [list(windows)[i % 2] for i in range(config.layers)]
    if set(kinds) - set(windows):
        raise CheckpointError(f"layer_types are {sorted(set(kinds))}; this reference builds {sorted(windows)}")
    if raw.get("experts_per_token", raw["num_experts_per_tok"]) != raw["num_experts_per_tok"]:
        raise CheckpointError(f"experts_per_token is {raw['experts_per_token']}; expected num_experts_per_tok")
    _only(raw, {"attention_bias": True, "swiglu_alpha": SWIGLU_ALPHA})

    def attention(weights: Weights, prefix: str, number: int | None) -> Attends:
        window = windows[kinds[number]] if number is not None else None
        heads = _heads(raw, rotation, bias=True, out_bias=True, sinks=True, window=window)
        return GroupedAttention(weights, f"{prefix}self_attn.", heads)

    return Family(config=config, attention=attention, mixture=read_gpt_oss(raw))


#: Of a next-token layer in a folder of its own, layer 0 of one: what SGLang calls it, behind a family's name.
ALONE = "NextN"
FAMILIES: dict[str, Callable[[Raw], Family]] = {
    "DeepseekV2ForCausalLM": read_deepseek,
    "DeepseekV3ForCausalLM": read_deepseek,
    "DeepseekV32ForCausalLM": read_deepseek_sparse,
    "MixtralForCausalLM": read_mixtral_family,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Qwen3NextForCausalLM": read_qwen3_next,
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Glm4MoeForCausalLM": read_glm,
    "Glm4MoeLiteForCausalLM": read_deepseek,
    "MiMoForCausalLM": read_mimo,
    "Ernie4_5_MoeForCausalLM": read_ernie_family,
    "GptOssForCausalLM": read_gpt_oss_family,
}


#: Those that are published so.
OWN_FOLDERS = tuple(f"{name}{ALONE}" for name in ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"))


def read(path: Path) -> Family:
    """What `path`/config.json describes; CheckpointError if that is not built here."""
    keys = Keys.read(path)
    architecture = of_architecture(keys.file, keys, *FAMILIES, *OWN_FOLDERS)
    with all_keys(keys.file, architecture):
        family = FAMILIES[architecture.removesuffix(ALONE)](keys)
        if architecture in OWN_FOLDERS:
            _only(keys, {"num_hidden_layers": 1})
            family = replace(family, join=behind(0), draft="model.layers.0.", alone=True)
        keys.refuse("hidden_act", but="silu")
        keys.refuse("mlp_bias", but=False)
        _one_at_most(keys)
        keys.all_claimed()
        return family


def load_target(path: Path, dtype: torch.dtype, *, held: torch.dtype, device: torch.device | str) -> PaperTarget:
    """The main model of a folder of one of the FAMILIES; CheckpointError if it is not one that is built here."""
    family = read(path)
    weights = family.weights(path, held, device)
    stack = [family.layer(weights, f"model.layers.{i}.", i) for i in range(family.config.layers)]
    target = PaperTarget(weights, family.config, stack=stack)
    weights.all_taken(but=[name for name in weights if family.beside(name)])
    return target.computing(dtype)


def load_head(path: Path, target: Target, *, held: torch.dtype | None = None) -> NextNHead:
    """The next-token layer of such a folder; CheckpointError if there is none or it does not fit `target`."""
    family = read(path)
    if family.join is None:
        raise CheckpointError(f"{path}: {family.config.architecture} has no next-token layer")
    layers = None if family.alone else target.layers
    a_pair(path, family.config, vocab=target.vocab, hidden=target.hidden, layers=layers)
    weights = family.weights(path, held or target.dtype, target.device)
    head = NextNHead(weights, family.join, family.layer(weights, family.draft, None), target, family.config.eps)
    weights.all_taken(but=[name for name in weights if not (family.alone or family.beside(name))])
    return head
