"""EAGLE's autoregression head: fc over (token embedding, feature), then decoder layers; no final norm.

Source: EAGLE (arXiv 2401.15077) section 3.1 and the files of published heads. Row j holds the token at j+1 and the
feature at j, and its output stands for the feature at j+1. Output head and embedding are the target's. What a head has
is what its file holds: a bias of fc, biases of attention, and a norm before the first layer, which published ones leave
out. Published heads bring a copy of the embedding; a head whose copy is another one means its own, and says so in
`notes`. This module must not import sglang or transformers.

Shapes: T rows, m new rows, h hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from reference.attention import Kept, Sight
from reference.checkpoint import CheckpointError, Config, DamagedError, Weights, a_pair, all_keys, sizes
from reference.heads import Heads
from reference.keys import Keys
from reference.llama import heads_of, llama_layer, windows_of
from reference.model import Layer, OnLastState, Target, linear

#: Keys of the target whose config a head's was made from: its MLP and rotation are what its file and its text show.
OF_TARGET = (
    *("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts"),
    *("num_experts_per_tok", "shared_expert_intermediate_size", "use_mrope"),
)
OWN_EMBEDDING = "the draft's embedding is not the target's: the draft's own is used"
#: Copies of a target's weights differ from them by no more than a change of dtype: half a step of the coarsest.
ROUNDING = 2.0**-8


class DraftHead(OnLastState):
    """See the module. layers: of which only the first may lack an input norm."""

    algorithm = "EAGLE"
    provider = "paper"

    def __init__(self, weights: Weights, prefix: str, layers: Sequence[Layer], target: Target) -> None:
        h = target.hidden
        self.target, self.layers = target, tuple(layers)
        self.states: tuple[int, ...] = (target.layers,)
        self.fc = weights.take(f"{prefix}fc.weight", h, 2 * h)
        self.bias = weights.take(f"{prefix}fc.bias", h) if f"{prefix}fc.bias" in weights else None
        self.embedding = own_embedding(weights, f"{prefix}embed_tokens.weight", h, target)
        self.notes: Sequence[str] = () if self.embedding is None else (OWN_EMBEDDING,)

    @staticmethod
    def load(path: Path, target: Target, *, held: torch.dtype | None = None) -> DraftHead:
        """Read an EAGLE folder; CheckpointError if it is not one or does not fit `target`. held: see pairs.load_pair.

        Its architecture is a target's with or without Eagle at the end: published heads name either.
        """
        config, keys = read_draft(path)
        with all_keys(keys.file, "EAGLE"):
            weights = Weights(path, held or target.dtype, target.device)
            prefix = "model." if "model.fc.weight" in weights else ""
            heads = draft_heads(config, keys, weights, f"{prefix}layers.0.")
            windows, mlp_bias = windows_of(config, keys), bool(keys.get("mlp_bias", False))
            keys.get("bias")  # whether fc has one; the file shows it
            keys.all_claimed()
        a_pair(path, config, vocab=target.vocab, hidden=target.hidden)
        layers = [
            llama_layer(
                weights,
                f"{prefix}layers.{i}.",
                heads.seeing(windows[i]),
                intermediate=config.intermediate,
                input_norm=i > 0 or f"{prefix}layers.0.input_layernorm.weight" in weights,
                mlp_bias=mlp_bias,
            )
            for i in range(config.layers)
        ]
        head = DraftHead(weights, prefix, layers, target)
        weights.all_taken(but=target_copies(weights, target, "lm_head.weight"))
        return head

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """See Head.forward; g [m,h]."""
        x = linear(torch.cat((embedded(self, tokens), hidden), dim=-1), self.fc, self.bias)
        return through(self.layers, x, positions, sight, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Several(Kept):
    """What each of several layers keeps."""

    layers: tuple[Kept, ...]


def through(
    layers: Sequence[Layer], x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None
) -> tuple[Tensor, Several]:
    """x [m,h] through one layer after another (see Layer.forward)."""
    assert kept is None or isinstance(kept, Several)
    own = list[Kept]()
    for i, layer in enumerate(layers):
        x, one = layer.forward(x, positions, sight, kept.layers[i] if kept else None)
        own.append(one)
    return x, Several(layers=tuple(own))


class Embeds(Protocol):
    """A head that may have an embedding [V,h'] of its own."""

    target: Target
    embedding: Tensor | None


def embedded(head: Embeds, tokens: Tensor) -> Tensor:
    """tokens int64 [...] -> [...,h'], by the head's own embedding where it has one."""
    if head.embedding is None:
        return head.target.embed(tokens)
    return embedding(tokens, head.embedding).to(head.target.dtype)


def read_draft(path: Path) -> tuple[Config, Keys]:
    """Sizes and keys of a draft folder of Llama's arithmetic; CheckpointError if it is of none."""
    keys = Keys.read(path)
    with all_keys(keys.file, "EAGLE"):
        config = sizes(keys)
        keys.refuse("hidden_act", but="silu")
        for key in OF_TARGET:
            keys.get(key)
        if len(keys["architectures"]) != 1 or not config.architecture.startswith(("Llama", "Qwen2", "Qwen3")):
            raise CheckpointError(
                f"architectures is {keys['architectures']!r}; this reference builds heads of Llama's, Qwen2's or "
                "Qwen3's layers"
            )
    return config, keys


def draft_heads(config: Config, keys: Keys, weights: Weights, layer: str) -> Heads:
    """Attention of a draft's layers: what the file holds; CheckpointError where its config wants more of it."""
    parts = {"bias": "q_proj.bias", "out_bias": "o_proj.bias", "normed": "q_norm.weight"}
    has = {name: f"{layer}self_attn.{part}" in weights for name, part in parts.items()}
    if keys.get("attention_bias") and not has["bias"]:
        raise DamagedError(f"attention_bias is true, and there is no {layer}self_attn.q_proj.bias")
    return heads_of(config, keys, **has)


def own_embedding(weights: Weights, name: str, hidden: int, target: Target) -> Tensor | None:
    """The draft's embedding [V,hidden] if it is not the target's; None where it has none, or a copy."""
    if name not in weights:
        return None
    own = weights.take(name, target.vocab, hidden)
    return None if hidden == target.hidden and _same(own, target.embed) else own


def target_copies(weights: Weights, target: Target, name: str) -> Collection[str]:
    """`name` if the draft has it and it is a copy of the target's output head."""
    if name not in weights:
        return ()
    unit = torch.eye(target.hidden, dtype=target.dtype, device=target.device)
    theirs = target.logits(unit).T
    own = weights.take(name, *theirs.shape)
    if not _close(own, theirs):
        raise CheckpointError(f"{weights.path}: {name!r} is not the target's; EAGLE's head speaks through the target's")
    return (name,)


def _same(own: Tensor, embed: Callable[[Tensor], Tensor]) -> bool:
    ids, step = torch.arange(len(own), device=own.device), 4096
    return all(_close(own[i : i + step], embed(ids[i : i + step])) for i in range(0, len(ids), step))


def _close(own: Tensor, theirs: Tensor) -> bool:
    return bool(torch.allclose(own.float(), theirs.float(), rtol=ROUNDING, atol=1e-6))
