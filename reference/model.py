"""The models of one request: a target and an EAGLE draft head, made of decoder layers that keep their rows.

Written from the Llama paper (arXiv 2302.13971), RoPE (arXiv 2104.09864) and EAGLE (arXiv 2401.15077), to be checked
against them in one sitting. A forward runs new rows over those that its caller kept; nothing here remembers a call.
Weights are held once, in one dtype; `computing` gives a view of the same weights that computes in another, and casts
them one by one. This module must not import sglang or transformers.

Shapes: T rows, m new rows, h hidden width, V vocabulary, H heads, G key/value heads, d head width, L layers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from reference.attention import Kept, KeyValues, Sight, attend
from reference.checkpoint import CheckpointError, Config, Weights, a_pair

TARGET_ARCHITECTURE = "LlamaForCausalLM"
#: The same arithmetic, and a norm over each query and key head before they are rotated (arXiv 2505.09388).
QWEN3_ARCHITECTURE = "Qwen3ForCausalLM"
#: The same norms, and a gate a head (see reference.mtp).
STEP_ARCHITECTURE = "Step3p5ForCausalLM"
DRAFT_ARCHITECTURE = "LlamaForCausalLMEagle"
#: How many rows are in the second half of a layer at a time.
ROWS = 4096

torch.set_float32_matmul_precision("highest")  # float32 is float32 on a GPU too


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [...,i], weight [o,i], bias [o] -> [...,o], in the dtype of x."""
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [...,h] divided by its root mean square over h, times weight [h]; never narrower than float32 inside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate x [T,H,d] by positions [T]: pair (i, i + d/2) turns by position * theta^(-2i/d), as HF lays pairs out."""
    d, wide = x.shape[-1], torch.promote_types(x.dtype, torch.float32)  # half precision cannot hold an angle
    frequency = 1.0 / theta ** (torch.arange(0, d, 2, dtype=wide, device=x.device) / d)
    angle = positions[:, None] * frequency
    cos, sin = angle.cos()[:, None, :].to(x.dtype), angle.sin()[:, None, :].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention:
    """Queries, keys and values of each row; a norm a head and a gate a head where the architecture has them.

    width: what it reads a row, h unless said.
    """

    def __init__(self, weights: Weights, prefix: str, config: Config, *, width: int | None = None) -> None:
        c, take, width = config, weights.take, width or config.hidden
        wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.config = config
        self.q = take(f"{prefix}q_proj.weight", wide, width)
        self.k = take(f"{prefix}k_proj.weight", narrow, width)
        self.v = take(f"{prefix}v_proj.weight", narrow, width)
        self.o = take(f"{prefix}o_proj.weight", c.hidden, wide)
        gated = c.architecture == STEP_ARCHITECTURE
        normed = gated or c.architecture == QWEN3_ARCHITECTURE
        self.q_norm = take(f"{prefix}q_norm.weight", c.head_dim) if normed else None
        self.k_norm = take(f"{prefix}k_norm.weight", c.head_dim) if normed else None
        self.head_gate = take(f"{prefix}g_proj.weight", c.heads, width) if gated else None

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """x [m,width], positions int64 [m] -> what attention adds to the residual stream, [m,h], and all rows kept."""
        c, rows = self.config, x.shape[0]
        q = self._normed(linear(x, self.q).view(rows, c.heads, c.head_dim), self.q_norm)
        k = self._normed(linear(x, self.k).view(rows, c.kv_heads, c.head_dim), self.k_norm)
        q, k = rope(q, positions, c.rope_theta), rope(k, positions, c.rope_theta)
        v = linear(x, self.v).view(rows, c.kv_heads, c.head_dim)
        held = KeyValues(keys=k, values=v, positions=positions).behind(kept)
        mixed = attend(q, held, sight, scale=c.head_dim**-0.5)
        if self.head_gate is not None:
            mixed = mixed * linear(x, self.head_gate).sigmoid()[:, :, None]
        return linear(mixed.reshape(rows, -1), self.o), held

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.config.eps)


class Mlp:
    """A gated MLP of any width."""

    def __init__(self, weights: Weights, prefix: str, *, hidden: int, width: int) -> None:
        self.gate = weights.take(f"{prefix}gate_proj.weight", width, hidden)
        self.up = weights.take(f"{prefix}up_proj.weight", width, hidden)
        self.down = weights.take(f"{prefix}down_proj.weight", hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]."""
        return linear(silu(linear(x, self.gate)) * linear(x, self.up), self.down)


class Attends(Protocol):
    """Whatever lets a row see others."""

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """x [m,width], positions int64 [m] -> what it adds to the residual stream, [m,h], and all rows kept."""


class RowWise(Protocol):
    """Whatever looks at each row alone: an MLP, experts."""

    def forward(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]."""


class Layer(Protocol):
    """One decoder layer, whatever is in it. `kept` is its own record of the rows that it ran before."""

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """x [m,h] of new rows, positions int64 [m], whom they see -> [m,h], and the record with the new rows in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Attention and an MLP, each added to the residual stream, each behind a norm [h]."""

    input_norm: Tensor | None
    attention: Attends
    post_norm: Tensor
    mlp: RowWise
    eps: float

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """See Layer.forward."""
        read = x if self.input_norm is None else rms_norm(x, self.input_norm, self.eps)
        added, kept = self.attention.forward(read, positions, sight, kept)
        return self.add_mlp(x + added), kept

    def add_mlp(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]: the second half of the layer."""
        blocks = [x[start : start + ROWS] for start in range(0, len(x), ROWS)]
        return torch.cat([one + self.mlp.forward(rms_norm(one, self.post_norm, self.eps)) for one in blocks])


def llama_layer(
    weights: Weights,
    prefix: str,
    config: Config,
    *,
    input_norm: bool = True,
    width: int | None = None,
    post_norm: str = "post_attention_layernorm",
) -> DecoderLayer:
    """A Llama layer. width: what attention reads a row, h unless said. post_norm: what the second norm is called."""
    take, h = weights.take, config.hidden
    return DecoderLayer(
        input_norm=take(f"{prefix}input_layernorm.weight", h) if input_norm else None,
        attention=Attention(weights, f"{prefix}self_attn.", config, width=width),
        post_norm=take(f"{prefix}{post_norm}.weight", h),
        mlp=Mlp(weights, f"{prefix}mlp.", hidden=h, width=config.intermediate),
        eps=config.eps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """A sequence that a target has read, and on which branches may hang.

    states: the wanted hidden states of the rows of that forward, [T,h], by index: 0 the embedding, i what layer i-1
    gave, L what logits are made of. kept: what each layer keeps of all rows read so far. rows: how many those are.
    """

    states: Mapping[int, Tensor]
    kept: tuple[Kept, ...]
    rows: int

    @property
    def wanted(self) -> Collection[int]:
        return self.states.keys()


class Target(Protocol):
    """The model whose greedy text is the only right text, whoever provides it.

    provider: "paper", or whose module computes it. layers: L. dtype: what it computes in.
    """

    provider: str
    vocab: int
    hidden: int
    layers: int
    dtype: torch.dtype
    device: torch.device

    def computing(self, dtype: torch.dtype) -> Self:
        """A view of the same weights that computes in `dtype`."""

    def read(self, tokens: Tensor | Sequence[int], *, keep: Collection[int], after: Trunk | None = None) -> Trunk:
        """One causal forward over T tokens, behind those of `after`; keep: which states are wanted (see Trunk)."""

    def branch(self, trunk: Trunk, tokens: Tensor, positions: Tensor, sight: Sight) -> Mapping[int, Tensor]:
        """tokens, positions int64 [m] of rows that hang on rows of `trunk` -> its wanted states, [m,h] each."""

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [...,h]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """State L [...,h] -> [...,V]."""


class PaperTarget:
    """A target computed here. stack: its layers, Llama's or Qwen3's unless given."""

    provider = "paper"

    def __init__(self, weights: Weights, config: Config, *, stack: Sequence[Layer] | None = None) -> None:
        self.config, self.dtype, self.device = config, weights.dtype, weights.device
        self.vocab, self.hidden, self.layers = config.vocab, config.hidden, config.layers
        self.embedding = weights.take("model.embed_tokens.weight", config.vocab, config.hidden)
        self.stack: Sequence[Layer] = stack or [
            llama_layer(weights, f"model.layers.{i}.", config) for i in range(config.layers)
        ]
        self.norm = weights.take("model.norm.weight", config.hidden)
        tied = config.tied and "lm_head.weight" not in weights
        self.head = self.embedding if tied else weights.take("lm_head.weight", config.vocab, config.hidden)

    @staticmethod
    def load(
        path: Path,
        dtype: torch.dtype = torch.float32,
        *,
        held: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> PaperTarget:
        """Read an HF Llama or Qwen3 folder; CheckpointError if it is neither.

        held: the dtype another program keeps the weights in, so that both compute with the same numbers.
        """
        config = Config.read(path, architecture=TARGET_ARCHITECTURE, or_else=QWEN3_ARCHITECTURE)
        return PaperTarget(Weights(path, held or dtype, device), config).computing(dtype)

    def computing(self, dtype: torch.dtype) -> Self:
        """See Target.computing."""
        view = copy.copy(self)
        view.dtype = dtype
        return view

    def read(self, tokens: Tensor | Sequence[int], *, keep: Collection[int], after: Trunk | None = None) -> Trunk:
        """See Target.read."""
        ids, start = torch.as_tensor(tokens, device=self.device), after.rows if after else 0
        positions = torch.arange(start, start + len(ids), device=self.device)
        sight = Sight.causal(len(ids), kept=start, device=self.device)
        states, kept = self._run(ids, positions, sight, after.kept if after else None, keep)
        return Trunk(states=states, kept=kept, rows=start + len(ids))

    def branch(self, trunk: Trunk, tokens: Tensor, positions: Tensor, sight: Sight) -> Mapping[int, Tensor]:
        """See Target.branch."""
        return self._run(tokens, positions, sight, trunk.kept, trunk.wanted, keeping=False)[0]

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        sight: Sight,
        before: tuple[Kept, ...] | None,
        keep: Collection[int],
        *,
        keeping: bool = True,
    ) -> tuple[dict[int, Tensor], tuple[Kept, ...]]:
        x, kept = self.embed(tokens), list[Kept]()
        states = {0: x} if 0 in keep else {}
        for i, layer in enumerate(self.stack):
            x, own = layer.forward(x, positions, sight, before[i] if before else None)
            if keeping:
                kept.append(own)
            if i + 1 in keep:
                states[i + 1] = self.finished(x) if i + 1 == self.layers else x
        return states, tuple(kept)

    def finished(self, x: Tensor) -> Tensor:
        """What the last layer gave [m,h] -> state L [m,h]: behind the final norm."""
        return rms_norm(x, self.norm, self.config.eps)

    def hidden_states(self, tokens: Tensor | Sequence[int]) -> list[Tensor]:
        """tokens int64 [T] -> all L+1 states [T,h] of one forward, in order (see Trunk)."""
        return list(self.read(tokens, keep=range(self.layers + 1)).states.values())

    def forward(self, tokens: Tensor | Sequence[int], positions: Tensor | None = None) -> Tensor:
        """State L [T,h] of one causal forward over T tokens, at positions [T] if they are not 0..T-1."""
        ids = torch.as_tensor(tokens, device=self.device)
        places = torch.arange(len(ids), device=self.device) if positions is None else positions
        sight = Sight.causal(len(ids), device=self.device)
        return self._run(ids, places, sight, None, (self.layers,))[0][self.layers]

    def embed(self, tokens: Tensor) -> Tensor:
        """See Target.embed."""
        return embedding(tokens, self.embedding).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Target.logits."""
        return linear(hidden, self.head)


class Drafter(Protocol):
    """Whatever drafts for a target. w is the width of what the target hands over a row."""

    #: how a scenario's `spec` calls drafting with it
    algorithm: str
    #: "paper", or whose module computes it
    provider: str
    #: which of the target's states it needs (see Trunk)
    states: tuple[int, ...]

    @property
    def target(self) -> Target:
        """The model it drafts for."""

    def computing(self, dtype: torch.dtype) -> Self:
        """A view of the same weights that computes in `dtype`."""

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """Hidden states [T,h] of the target by index -> what it hands over, [T,w]."""


class Head(Drafter, Protocol):
    """A head that drafts step by step. h' is the width of what one draft row hands to the next."""

    def enter(self, features: Tensor) -> Tensor:
        """features [T,w] -> [T,h'], as wide as what later draft rows get."""

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """tokens int64 [m], hidden [m,h'], positions int64 [m] of new rows, whom they see, what is kept of earlier ones
        -> g [m,h'], handed to the next row, and what is kept with the new rows in it."""

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h'] -> [...,V] over the target's vocabulary; -inf for tokens it cannot propose."""


class DraftHead:
    """EAGLE's autoregression head: fc over (token embedding, feature), then one decoder layer; no final norm.

    Embedding and lm_head are the target's, and the layer has no input norm (EAGLE section 3.1 and its released
    weights). Row j holds the token at j+1 and the feature at j, and its output stands for the feature at j+1.
    """

    algorithm = "EAGLE"
    provider = "paper"

    def __init__(self, weights: Weights, config: Config, target: Target) -> None:
        h = config.hidden
        self.config, self.target = config, target
        self.states: tuple[int, ...] = (target.layers,)
        self.fc = weights.take("fc.weight", h, 2 * h)
        self.bias = weights.take("fc.bias", h) if "fc.bias" in weights else None
        self.layer = llama_layer(weights, "layers.0.", config, input_norm=False)

    @staticmethod
    def load(path: Path, target: Target, *, held: torch.dtype | None = None) -> DraftHead:
        """Read an EAGLE folder; CheckpointError if it is not one or does not fit `target`. held: see PaperTarget."""
        config = Config.read(path, architecture=DRAFT_ARCHITECTURE)
        a_pair(path, config, vocab=target.vocab, hidden=target.hidden)
        if config.layers != 1:
            raise CheckpointError(f"{path}: num_hidden_layers is {config.layers}; this reference builds only 1")
        return DraftHead(Weights(path, held or target.dtype, target.device), config, target)

    def computing(self, dtype: torch.dtype) -> Self:
        """See Drafter.computing."""
        return on_target(self, self.target.computing(dtype))

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """The target's last hidden state after its final norm, [T,h]."""
        return states[self.target.layers]

    def enter(self, features: Tensor) -> Tensor:
        """As it is: the first draft row and all later ones read the same kind of state."""
        return features

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """See Head.forward; g [m,h]."""
        x = linear(torch.cat((self.target.embed(tokens), hidden), dim=-1), self.fc, self.bias)
        return self.layer.forward(x, positions, sight, kept)

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h] -> [...,V], through the target's lm_head."""
        return self.target.logits(g)


D = TypeVar("D")


def on_target(head: D, target: Target) -> D:
    """The same head over another view of its target, in whose dtype it computes."""
    view = copy.copy(head)
    view.target = target  # type: ignore[attr-defined]
    return view
