"""The EAGLE-3 draft head: features of several target layers, one layer twice as wide, a head of its own.

Source: EAGLE-3 (arXiv 2503.01840) section 3 and the files of published heads. What the paper leaves open, the files
settle: the layer's attention reads [norm(embedding), norm(hidden)], its residual is the hidden state, later rows read
the layer's output before the last norm, and `d2t` holds, for each draft id, target id minus draft id.

Published heads differ in what the config switches: which target layers (`eagle_aux_hidden_state_layer_ids`), a norm
for each feature or for all before fc, the residual taken after its norm, the state handed on after the last norm.
This module must not import sglang or transformers.

Shapes: T rows, h target width, a features, h' draft width, V target and V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from reference.attention import Kept, Sight
from reference.checkpoint import CheckpointError, Config, Weights, read_json
from reference.model import Target, linear, llama_layer, on_target, rms_norm

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What distinguishes published heads.

    states: which of the target's hidden states are features: s is the output of layer s-1, in ascending order.
    target_hidden: h. vocab: V'. own_embedding: whether the head reads its own embedding, not the target's.
    """

    states: tuple[int, ...]
    target_hidden: int
    vocab: int
    own_embedding: bool
    fc_bias: bool = False
    norm_each_feature: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @staticmethod
    def read(path: Path, config: Config, target: Target) -> Variant:
        """The variant that `path`/config.json describes; CheckpointError if it does not fit the target."""
        file = Path(path) / "config.json"
        raw = read_json(file)
        nested: dict[str, Any] = raw.get("eagle_config") or {}
        width = raw.get("target_hidden_size") or config.hidden
        if width != target.hidden:
            raise CheckpointError(f"{file}: target hidden size is {width}; expected the target's {target.hidden}")
        if config.vocab != target.vocab:
            raise CheckpointError(f"{file}: vocab_size is {config.vocab}; expected the target's {target.vocab}")
        if nested.get("use_aux_hidden_state", True) is not True:
            raise CheckpointError(f"{file}: use_aux_hidden_state is false; this reference builds only true")
        return Variant(
            states=_states(file, nested.get("eagle_aux_hidden_state_layer_ids"), target.layers),
            target_hidden=width,
            vocab=raw.get("draft_vocab_size") or config.vocab,
            own_embedding=width != config.hidden,
            fc_bias=bool(raw.get("bias", False)),
            norm_each_feature=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
            norm_before_fc=bool(nested.get("norm_before_fc", raw.get("norm_before_fc", False))),
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
            norm_output=bool(raw.get("norm_output", False)),
        )


def _states(file: Path, layers: list[int] | None, count: int) -> tuple[int, ...]:
    """Feature states from layer ids, or the default: what layers 2, L/2 and L-3 read, low, middle and high."""
    states = [2, count // 2, count - 3] if layers is None else [layer + 1 for layer in layers]
    if not states or states != sorted(set(states)) or not 1 <= states[0] <= states[-1] < count:
        named = "the default layers" if layers is None else f"eagle_aux_hidden_state_layer_ids {layers}"
        raise CheckpointError(
            f"{file}: {named} do not name ascending layers 0..{count - 2} of the target's {count}; "
            "expected different ids, lowest first"
        )
    return tuple(states)


class Eagle3Head:
    """fc over the features, then one layer over (token embedding, state), a last norm, and a head over V' tokens."""

    algorithm = "EAGLE3"
    provider = "paper"

    def __init__(self, weights: Weights, config: Config, variant: Variant, target: Target) -> None:
        h, wide, take = config.hidden, variant.target_hidden * len(variant.states), weights.take
        self.config, self.variant, self.target = config, variant, target
        self.states: tuple[int, ...] = tuple(sorted({*variant.states, target.layers}))
        self.embedding = take("embed_tokens.weight", config.vocab, h) if variant.own_embedding else None
        self.fc = take("fc.weight", h, wide)
        self.bias = take("fc.bias", h) if variant.fc_bias else None
        self.feature_norms = [
            take(f"fc_norm.{i}.weight", variant.target_hidden)
            for i in range(len(variant.states) if variant.norm_each_feature else 0)
        ]
        self.fc_norm = take("input_norm.weight", wide) if variant.norm_before_fc else None
        self.layer = llama_layer(weights, "midlayer.", config, input_norm=True, width=2 * h)
        self.hidden_norm = take("midlayer.hidden_norm.weight", h)
        self.norm = take("norm.weight", h)
        self.head = take("lm_head.weight", variant.vocab, h)
        self.target_ids = self._target_ids(weights).to(target.device)

    def _target_ids(self, weights: Weights) -> Tensor:
        """The target id of each draft id, int64 [V']."""
        own = torch.arange(self.variant.vocab)
        if "d2t" not in weights:
            if self.variant.vocab != self.config.vocab:
                raise CheckpointError(f"{weights.path}: has no d2t; expected one for a vocabulary of its own")
            return own
        ids = own + weights.take("d2t", self.variant.vocab).to(torch.int64)
        if len(set(ids.tolist())) != len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab:
            raise CheckpointError(f"{weights.path}: d2t does not lead to {len(ids)} different target ids")
        return ids

    @staticmethod
    def load(path: Path, target: Target, *, held: torch.dtype | None = None) -> Eagle3Head:
        """Read an EAGLE-3 folder; CheckpointError if it is not one or does not fit `target`.

        held: the dtype the weights are kept in, as an engine of that dtype holds them.
        """
        config = Config.read(path, architecture=ARCHITECTURE)
        if config.layers != 1:
            raise CheckpointError(f"{path}: num_hidden_layers is {config.layers}; this reference builds only 1")
        weights = Weights(path, held or target.dtype, target.device)
        return Eagle3Head(weights, config, Variant.read(path, config, target), target)

    def computing(self, dtype: torch.dtype) -> Self:
        """See Drafter.computing."""
        return on_target(self, self.target.computing(dtype))

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """The chosen hidden states side by side, [T,a*h]."""
        return torch.cat([states[state] for state in self.variant.states], dim=-1)

    def enter(self, features: Tensor) -> Tensor:
        """features [T,a*h] -> fc -> [T,h']."""
        eps = self.config.eps
        if self.fc_norm is not None:
            features = rms_norm(features, self.fc_norm, eps)
        if self.feature_norms:
            parts = torch.split(features, self.variant.target_hidden, dim=-1)
            normed = [rms_norm(part, weight, eps) for part, weight in zip(parts, self.feature_norms, strict=True)]
            features = torch.cat(normed, dim=-1)
        return linear(features, self.fc, self.bias)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """See Head.forward; g [m,h']."""
        layer, eps = self.layer, self.config.eps
        assert layer.input_norm is not None
        normed = rms_norm(hidden, self.hidden_norm, eps)
        read = torch.cat((rms_norm(self._embed(tokens), layer.input_norm, eps), normed), dim=-1)
        residual = normed if self.variant.norm_before_residual else hidden
        added, kept = layer.attention.forward(read, positions, sight, kept)
        g = layer.add_mlp(residual + added)
        return (rms_norm(g, self.norm, eps) if self.variant.norm_output else g), kept

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.embedding is None:
            return self.target.embed(tokens)
        return embedding(tokens, self.embedding).to(self.target.dtype)

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h'] -> [...,V]; tokens outside the draft vocabulary get -inf."""
        normed = g if self.variant.norm_output else rms_norm(g, self.norm, self.config.eps)
        own = linear(normed, self.head)
        logits = torch.full((*own.shape[:-1], self.config.vocab), float("-inf"), dtype=own.dtype, device=own.device)
        logits[..., self.target_ids] = own
        return logits
