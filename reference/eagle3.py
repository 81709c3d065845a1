"""The EAGLE-3 draft head: features of several target layers, a first layer twice as wide, a head of its own.

Source: EAGLE-3 (arXiv 2503.01840) section 3 and the files of published heads. What the paper leaves open, the files
settle: the first layer's attention reads [norm(embedding), norm(hidden)], its residual is the hidden state, later rows
read the last layer's output before the last norm, and `d2t` holds, for each draft id, target id minus draft id.

Published heads differ in what config and files say: which target layers (`eagle_aux_hidden_state_layer_ids`), a norm
for each feature or for all before fc, the residual taken after its norm, the state handed on after the last norm, more
layers behind the first, biases, an embedding of its own, no output head of its own. Rotation, sizes and biases are the
draft's own. This module must not import sglang or transformers.

Shapes: T rows, h target width, a features, h' draft width, V target and V' draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from reference.attention import Kept, Sight
from reference.checkpoint import CheckpointError, Config, DamagedError, Weights, all_keys
from reference.eagle1 import OWN_EMBEDDING, Several, draft_heads, embedded, own_embedding, read_draft, through
from reference.keys import Keys
from reference.llama import llama_layer, windows_of
from reference.model import DecoderLayer, Target, linear, on_target, rms_norm

#: What the first layer is called.
PREFIXES = ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0.")

#: The key that names the layers of the target.
LAYERS = "eagle_aux_hidden_state_layer_ids"
#: How targets begin whose heads are published with layers named either way: by TorchSpec inputs, by SpecForge outputs.
EITHER_WAY = ("Deepseek", "Glm4MoeLite")
#: What NVIDIA's heads say in eagle_config, and what of it is built here.
BUILT: dict[str, object] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "eagle_decoder_type": "llama",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What distinguishes published heads.

    states: which of the target's hidden states are features: s is the output of layer s-1, in ascending order.
    target_hidden: h. vocab: V'.
    """

    states: tuple[int, ...]
    target_hidden: int
    vocab: int
    fc_bias: bool = False
    norm_each_feature: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @staticmethod
    def read(keys: Keys, config: Config, target: Target) -> Variant:
        """The variant that a config describes; CheckpointError if it does not fit the target."""
        nested = keys.get("eagle_config") or Keys(keys.file, {})
        width = keys.get("target_hidden_size") or config.hidden
        if width != target.hidden:
            raise DamagedError(f"target hidden size is {width}; expected the target's {target.hidden}")
        if config.vocab != target.vocab:
            raise DamagedError(f"vocab_size is {config.vocab}; expected the target's {target.vocab}")
        for key, only in BUILT.items():
            nested.refuse(key, but=only)
        nested.get("parallel_draft_heads_num_layers")  # of more than one parallel step
        of_target = getattr(getattr(target, "config", None), "architecture", "")
        states = _states(nested.get(LAYERS), keys.get(LAYERS), target.layers, either=of_target.startswith(EITHER_WAY))
        if (count := keys.get("num_aux_hidden_states", len(states))) != len(states):
            raise CheckpointError(f"num_aux_hidden_states is {count}; expected {len(states)}, one for each layer named")
        return Variant(
            states=states,
            target_hidden=width,
            vocab=keys.get("draft_vocab_size") or config.vocab,
            fc_bias=bool(keys.get("bias", False)),
            norm_each_feature=any([bool(keys.get("fc_norm")), bool(keys.get("use_aux_norm"))]),
            norm_before_fc=any([bool(nested.get("norm_before_fc")), bool(keys.get("norm_before_fc"))]),
            norm_before_residual=bool(keys.get("norm_before_residual", False)),
            norm_output=bool(keys.get("norm_output", False)),
        )


def _states(nested: list[int] | None, beside: list[int] | None, count: int, *, either: bool = False) -> tuple[int, ...]:
    """Feature states from layer ids, or the default: what layers 2, L/2 and L-3 read, low, middle and high.

    nested: of eagle_config, where SpecForge and ModelOpt name layers whose output is read; beside: of the config
    itself, where speculators and vLLM name those whose input is. either: eagle_config may mean inputs too, unless its
    first layer is 1, the low one by its output.
    """
    default = [2, count // 2, count - 3]
    if nested and beside and nested != beside:
        raise CheckpointError(f"{LAYERS} is {nested} in eagle_config and {beside} beside it; expected one")
    if nested and (list(nested) == default or (either and nested[0] != 1)):
        raise CheckpointError(
            f"eagle_config.{LAYERS} is {nested}; whether these layers' inputs or their outputs are meant is said "
            "nowhere (SGLang reads the former of some targets, the latter of others)"
        )
    states = [layer + 1 for layer in nested] if nested else beside or default
    if states != sorted(set(states)) or not 1 <= states[0] <= states[-1] < count:
        named = f"{LAYERS} {nested or beside}" if nested or beside else "the default layers"
        raise CheckpointError(
            f"{named} do not name ascending layers 0..{count - 2} of the target's {count}; "
            "expected different ids, lowest first"
        )
    return tuple(states)


class Eagle3Head:
    """fc over the features, layers over (token embedding, state), a last norm, and a head over V' tokens."""

    algorithm = "EAGLE3"
    provider = "paper"

    def __init__(
        self, weights: Weights, first: str, layers: Sequence[DecoderLayer], variant: Variant, target: Target
    ) -> None:
        outer, take, h = first.removesuffix("midlayer.").removesuffix("layers.0."), weights.take, _width(layers)
        wide = variant.target_hidden * len(variant.states)
        self.variant, self.target, self.eps = variant, target, layers[0].eps
        self.states: tuple[int, ...] = tuple(sorted({*variant.states, target.layers}))
        self.first, self.later = layers[0], tuple(layers[1:])
        self.fc = take(f"{outer}fc.weight", h, wide)
        self.bias = take(f"{outer}fc.bias", h) if variant.fc_bias else None
        self.feature_norms = [
            take(_feature_norm(weights, outer, i), variant.target_hidden)
            for i in range(len(variant.states) if variant.norm_each_feature else 0)
        ]
        self.fc_norm = take(f"{outer}input_norm.weight", wide) if variant.norm_before_fc else None
        self.hidden_norm = take(f"{first}hidden_norm.weight", h)
        self.norm = take(f"{outer}norm.weight", h)
        self.head = take("lm_head.weight", variant.vocab, h) if "lm_head.weight" in weights else None
        if self.head is None and (h, variant.vocab) != (target.hidden, target.vocab):
            raise DamagedError(
                f"{weights.path}: has no lm_head.weight; the target's is of {target.vocab} tokens and width "
                f"{target.hidden}, this draft of {variant.vocab} and {h}"
            )
        self.target_ids = self._target_ids(weights).to(target.device)
        embedding = f"{outer}embed_tokens.weight"
        self.embedding = own_embedding(weights, embedding if embedding in weights else "embed_tokens.weight", h, target)
        if self.embedding is None and h != target.hidden:
            raise DamagedError(f"{weights.path}: has no embed_tokens.weight; the target's is {target.hidden} wide")
        own = self.embedding is not None and h == target.hidden
        self.notes: Sequence[str] = (OWN_EMBEDDING,) if own else ()

    def _target_ids(self, weights: Weights) -> Tensor:
        """The target id of each draft id, int64 [V']."""
        own = torch.arange(self.variant.vocab)
        if "d2t" not in weights:
            if self.variant.vocab != self.target.vocab:
                raise DamagedError(f"{weights.path}: has no d2t; expected one for a vocabulary of its own")
            return own
        ids = own + weights.take("d2t", self.variant.vocab).to("cpu", torch.int64)
        if len(set(ids.tolist())) != len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.target.vocab:
            raise DamagedError(f"{weights.path}: d2t does not lead to {len(ids)} different target ids")
        return ids

    @staticmethod
    def load(path: Path, target: Target, *, held: torch.dtype | None = None) -> Eagle3Head:
        """Read an EAGLE-3 folder; CheckpointError if it is not one or does not fit `target`.

        held: the dtype the weights are kept in, as an engine of that dtype holds them.
        """
        config, keys = read_draft(path)
        with all_keys(keys.file, "EAGLE-3"):
            weights = Weights(path, held or target.dtype, target.device)
            first = next((one for one in PREFIXES if f"{one}hidden_norm.weight" in weights), None)
            if first is None:
                raise CheckpointError(f"has no tensor {PREFIXES[0]}hidden_norm.weight; expected an EAGLE-3 head")
            heads = draft_heads(config, keys, weights, first)
            windows, mlp_bias = windows_of(config, keys), bool(keys.get("mlp_bias", False))
            variant = Variant.read(keys, config, target)
            keys.all_claimed()
            if config.layers > 1 and first.endswith("midlayer."):
                raise CheckpointError(f"num_hidden_layers is {config.layers}; expected layers.0 and on, not a midlayer")
        names = [first, *(f"{first.removesuffix('0.')}{i}." for i in range(1, config.layers))]
        layers = [
            llama_layer(
                weights,
                name,
                dataclasses.replace(heads, width=None if i else 2 * config.hidden, window=windows[i]),
                intermediate=config.intermediate,
                first_norm=_first_norm(weights, name) if i else "input_layernorm",
                mlp_bias=mlp_bias,
            )
            for i, name in enumerate(names)
        ]
        head = Eagle3Head(weights, first, layers, variant, target)
        weights.all_taken(but=("t2d",))
        return head

    def computing(self, dtype: torch.dtype) -> Self:
        """See Drafter.computing."""
        return on_target(self, self.target.computing(dtype))

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """The chosen hidden states side by side, [T,a*h]."""
        return torch.cat([states[state] for state in self.variant.states], dim=-1)

    def enter(self, features: Tensor) -> Tensor:
        """features [T,a*h] -> fc -> [T,h']."""
        if self.fc_norm is not None:
            features = rms_norm(features, self.fc_norm, self.eps)
        if self.feature_norms:
            parts = torch.split(features, self.variant.target_hidden, dim=-1)
            normed = [rms_norm(part, weight, self.eps) for part, weight in zip(parts, self.feature_norms, strict=True)]
            features = torch.cat(normed, dim=-1)
        return linear(features, self.fc, self.bias)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """See Head.forward; g [m,h']."""
        assert kept is None or isinstance(kept, Several)
        assert self.first.input_norm is not None
        normed = rms_norm(hidden, self.hidden_norm, self.eps)
        read = torch.cat((rms_norm(embedded(self, tokens), self.first.input_norm, self.eps), normed), dim=-1)
        residual = normed if self.variant.norm_before_residual else hidden
        added, own = self.first.attention.forward(read, positions, sight, kept.layers[0] if kept else None)
        later = Several(layers=kept.layers[1:]) if kept else None
        g, others = through(self.later, self.first.add_mlp(residual + added), positions, sight, later)
        g = rms_norm(g, self.norm, self.eps) if self.variant.norm_output else g
        return g, Several(layers=(own, *others.layers))

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h'] -> [...,V]; tokens outside the draft vocabulary get -inf."""
        normed = g if self.variant.norm_output else rms_norm(g, self.norm, self.eps)
        own = self.target.logits(normed) if self.head is None else linear(normed, self.head)
        logits = torch.full((*own.shape[:-1], self.target.vocab), float("-inf"), dtype=own.dtype, device=own.device)
        logits[..., self.target_ids] = own
        return logits


def _feature_norm(weights: Weights, outer: str, i: int) -> str:
    """What a feature's norm is called; of three, older files say low, mid and high."""
    older = f"{outer}aux_norm_{('low', 'mid', 'high')[min(i, 2)]}.weight"
    return older if older in weights else f"{outer}fc_norm.{i}.weight"


def _first_norm(weights: Weights, prefix: str) -> str:
    """The norm in front of a later layer's attention; CheckpointError where its file holds two."""
    held = [name for name in ("input_layernorm", "hidden_norm") if f"{prefix}{name}.weight" in weights]
    if len(held) == 2:
        raise CheckpointError(
            f"{weights.path}: {prefix}* has an input_layernorm and a hidden_norm; which of them a layer behind the "
            "first reads is said nowhere (vLLM reads the former, SGLang the latter)"
        )
    return held[0] if held else "input_layernorm"


def _width(layers: Sequence[DecoderLayer]) -> int:
    return len(layers[0].post_norm)
