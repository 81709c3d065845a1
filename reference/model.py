"""The models of one request: a Llama or Qwen3 target and an EAGLE draft head, whole sequences, no KV cache.

Written from the Llama paper (arXiv 2302.13971), RoPE (arXiv 2104.09864) and EAGLE (arXiv 2401.15077), to be checked
against them in one sitting. Every row is recomputed from tokens each time; nothing here may remember a call. This
module must not import sglang or transformers.

Shapes: T rows, h hidden width, V vocabulary, H heads, G key/value heads, d head width, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from reference.checkpoint import CheckpointError, Config, Weights, a_pair

TARGET_ARCHITECTURE = "LlamaForCausalLM"
#: The same arithmetic, and a norm over each query and key head before they are rotated (arXiv 2505.09388).
QWEN3_ARCHITECTURE = "Qwen3ForCausalLM"
#: The same norms, and a gate a head (see reference.mtp).
STEP_ARCHITECTURE = "Step3p5ForCausalLM"
DRAFT_ARCHITECTURE = "LlamaForCausalLMEagle"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [...,h] divided by its root mean square over h, times weight [h]; never narrower than float32 inside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate x [T,H,d] by positions [T]: pair (i, i + d/2) turns by position * theta^(-2i/d), as HF lays pairs out."""
    d, wide = x.shape[-1], torch.promote_types(x.dtype, torch.float32)  # half precision cannot hold an angle
    frequency = 1.0 / theta ** (torch.arange(0, d, 2, dtype=wide) / d)
    angle = positions[:, None] * frequency
    cos, sin = angle.cos()[:, None, :].to(x.dtype), angle.sin()[:, None, :].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal(rows: int) -> Tensor:
    """bool [T,T]: row i sees rows 0..i."""
    return torch.ones(rows, rows, dtype=torch.bool).tril()


class Layer:
    """One decoder layer: attention and gated MLP, each added to the residual stream.

    width: what attention reads a row, h unless said. post_norm: what the weight of the second norm is called.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: Config,
        *,
        input_norm: bool = True,
        width: int | None = None,
        post_norm: str = "post_attention_layernorm",
    ) -> None:
        c, take, width = config, weights.take, width or config.hidden
        wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.config = config
        self.input_norm = take(f"{prefix}input_layernorm.weight", c.hidden) if input_norm else None
        self.q = take(f"{prefix}self_attn.q_proj.weight", wide, width)
        self.k = take(f"{prefix}self_attn.k_proj.weight", narrow, width)
        self.v = take(f"{prefix}self_attn.v_proj.weight", narrow, width)
        self.o = take(f"{prefix}self_attn.o_proj.weight", c.hidden, wide)
        gated = c.architecture == STEP_ARCHITECTURE
        normed = gated or c.architecture == QWEN3_ARCHITECTURE
        self.q_norm = take(f"{prefix}self_attn.q_norm.weight", c.head_dim) if normed else None
        self.k_norm = take(f"{prefix}self_attn.k_norm.weight", c.head_dim) if normed else None
        self.head_gate = take(f"{prefix}self_attn.g_proj.weight", c.heads, width) if gated else None
        self.post_norm = take(f"{prefix}{post_norm}.weight", c.hidden)
        self.gate = take(f"{prefix}mlp.gate_proj.weight", c.intermediate, c.hidden)
        self.up = take(f"{prefix}mlp.up_proj.weight", c.intermediate, c.hidden)
        self.down = take(f"{prefix}mlp.down_proj.weight", c.hidden, c.intermediate)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """x [T,h], positions int64 [T], mask bool [T,T] (row sees column) -> [T,h]."""
        return self.add_mlp(x + self.attention(self._norm(x, self.input_norm), positions, mask))

    def add_mlp(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]: the second half of the layer."""
        y = self._norm(x, self.post_norm)
        return x + linear(silu(linear(y, self.gate)) * linear(y, self.up), self.down)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.config.eps)

    def attention(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """x [T,width], positions int64 [T], mask bool [T,T] -> what attention adds to the residual stream, [T,h]."""
        c, rows = self.config, x.shape[0]
        q = self._norm(linear(x, self.q).view(rows, c.heads, c.head_dim), self.q_norm)
        k = self._norm(linear(x, self.k).view(rows, c.kv_heads, c.head_dim), self.k_norm)
        q, k = torch.split(rope(torch.cat((q, k), dim=1), positions, c.rope_theta), [c.heads, c.kv_heads], dim=1)
        v = linear(x, self.v).view(rows, c.kv_heads, c.head_dim)
        group = c.heads // c.kv_heads  # query heads g*group .. share key/value head g
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * c.head_dim**-0.5
        weight = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("hij,jhd->ihd", weight, v)
        if self.head_gate is not None:
            mixed = mixed * linear(x, self.head_gate).sigmoid()[:, :, None]
        return linear(mixed.reshape(rows, -1), self.o)


class Rows(Protocol):
    """One decoder layer, whatever is in it."""

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """x [T,h], positions int64 [T], mask bool [T,T] (row sees column) -> [T,h]."""


class Target:
    """The model whose greedy text is the only right text. layers: Llama's or Qwen3's unless given."""

    def __init__(self, weights: Weights, config: Config, *, layers: Sequence[Rows] | None = None) -> None:
        self.config = config
        self.embed = weights.take("model.embed_tokens.weight", config.vocab, config.hidden)
        self.layers: Sequence[Rows] = layers or [
            Layer(weights, f"model.layers.{i}.", config) for i in range(config.layers)
        ]
        self.norm = weights.take("model.norm.weight", config.hidden)
        tied = config.tied and "lm_head.weight" not in weights
        self.head = self.embed if tied else weights.take("lm_head.weight", config.vocab, config.hidden)

    @staticmethod
    def load(path: Path, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None) -> Target:
        """Read an HF Llama or Qwen3 folder; CheckpointError if it is neither.

        held: the dtype another program keeps the weights in, so that both compute with the same numbers.
        """
        config = Config.read(path, architecture=TARGET_ARCHITECTURE, or_else=QWEN3_ARCHITECTURE)
        return Target(Weights(path, dtype, held), config)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> list[Tensor]:
        """tokens int64 [T] -> L+1 tensors [T,h]: the embedding, each layer's output, the last one after the final norm.

        positions int64 [T] defaults to 0..T-1, mask bool [T,T] to causal.
        """
        states = self.layer_outputs(tokens, positions, mask)
        return [*states[:-1], rms_norm(states[-1], self.norm, self.config.eps)]

    def layer_outputs(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> list[Tensor]:
        """As hidden_states, the last one before the final norm."""
        positions = torch.arange(len(tokens)) if positions is None else positions
        mask = causal(len(tokens)) if mask is None else mask
        states = [embedding(tokens, self.embed)]
        for layer in self.layers:
            states.append(layer.forward(states[-1], positions, mask))
        return states

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The last hidden state after the final norm, [T,h]: what EAGLE hands to its draft head."""
        return self.hidden_states(tokens, positions, mask)[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,h] -> [...,V]."""
        return linear(hidden, self.head)


class Drafter(Protocol):
    """Whatever drafts for a target. w is the width of what the target hands over a row."""

    #: how a scenario's `spec` calls drafting with it
    algorithm: str

    @property
    def target(self) -> Target:
        """The model it drafts for."""

    def features(self, states: list[Tensor]) -> Tensor:
        """The target's L+1 hidden states [T,h] -> what it hands over, [T,w]."""


class Head(Drafter, Protocol):
    """A head that drafts step by step. h' is the width of what one draft row hands to the next."""

    def enter(self, features: Tensor) -> Tensor:
        """features [T,w] -> [T,h'], as wide as what later draft rows get."""

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """tokens int64 [T], hidden [T,h'], positions int64 [T], mask bool [T,T] -> g [T,h'], handed to the next row."""

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h'] -> [...,V] over the target's vocabulary; -inf for tokens it cannot propose."""


class DraftHead:
    """EAGLE's autoregression head: fc over (token embedding, feature), then one decoder layer; no final norm.

    Embedding and lm_head are the target's, and the layer has no input norm (EAGLE section 3.1 and its released
    weights). Row j holds the token at j+1 and the feature at j, and its output stands for the feature at j+1.
    """

    algorithm = "EAGLE"

    def __init__(self, weights: Weights, config: Config, target: Target) -> None:
        h = config.hidden
        self.config, self.target = config, target
        self.fc = weights.take("fc.weight", h, 2 * h)
        self.bias = weights.take("fc.bias", h) if "fc.bias" in weights else None
        self.layer = Layer(weights, "layers.0.", config, input_norm=False)

    @staticmethod
    def load(
        path: Path, target: Target, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None
    ) -> DraftHead:
        """Read an EAGLE folder; CheckpointError if it is not one or does not fit `target`. held: see Target.load."""
        config = Config.read(path, architecture=DRAFT_ARCHITECTURE)
        a_pair(path, config, target.config)
        if config.layers != 1:
            raise CheckpointError(f"{path}: num_hidden_layers is {config.layers}; this reference builds only 1")
        if dtype != target.embed.dtype:
            raise CheckpointError(f"{path}: asked for {dtype}; expected the target's {target.embed.dtype}")
        return DraftHead(Weights(path, dtype, held), config, target)

    def features(self, states: list[Tensor]) -> Tensor:
        """The target's last hidden state after its final norm, [T,h]."""
        return states[-1]

    def enter(self, features: Tensor) -> Tensor:
        """As it is: the first draft row and all later ones read the same kind of state."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """tokens int64 [T], hidden [T,h], positions int64 [T], mask bool [T,T] -> g [T,h]."""
        x = linear(torch.cat((embedding(tokens, self.target.embed), hidden), dim=-1), self.fc, self.bias)
        return self.layer.forward(x, positions, mask)

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h] -> [...,V], through the target's lm_head."""
        return self.target.logits(g)
