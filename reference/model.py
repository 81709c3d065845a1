"""What the models of one request are made of: decoder layers that keep their rows, a target, and what drafts for it.

Written from the Llama paper (arXiv 2302.13971). A forward runs new rows over those that its caller kept; nothing here
remembers a call. Weights are held once, in one dtype; `computing` gives a view of the same weights that computes in
another, and casts them one by one. This module must not import sglang or transformers.

Shapes: T rows, m new rows, h hidden width, V vocabulary, H heads, G key/value heads, d head width, L layers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from reference.attention import Kept, Sight
from reference.checkpoint import Config, Weights

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
    """A target computed here. stack: its layers."""

    provider = "paper"

    def __init__(self, weights: Weights, config: Config, *, stack: Sequence[Layer]) -> None:
        self.config, self.dtype, self.device = config, weights.dtype, weights.device
        self.vocab, self.hidden, self.layers = config.vocab, config.hidden, config.layers
        self.embedding = weights.take("model.embed_tokens.weight", config.vocab, config.hidden)
        self.stack = stack
        self.norm = weights.take("model.norm.weight", config.hidden)
        tied = config.tied and "lm_head.weight" not in weights
        self.head = self.embedding if tied else weights.take("lm_head.weight", config.vocab, config.hidden)

    @property
    def window(self) -> int | None:
        """Rows that a row sees in the layers with a sliding window, itself among them; None: no layer has one."""
        windows = [getattr(getattr(layer, "attention", None), "window", None) for layer in self.stack]
        return max((window for window in windows if window), default=None)

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

    def kept_behind(self, trunk: Trunk, tokens: Tensor, upto: Tensor) -> tuple[Kept, ...]:
        """What layers keep where token i, int64 [m], follows the first upto[i] rows of `trunk` alone."""
        sight = Sight(upto=upto, own=torch.eye(len(tokens), dtype=torch.bool, device=self.device))
        return self._run(tokens, upto, sight, trunk.kept, ())[1]

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
    #: what whoever reads a verdict should know of how the checkpoint was understood
    notes: Sequence[str]

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


D = TypeVar("D")


def on_target(head: D, target: Target) -> D:
    """The same head over another view of its target, in whose dtype it computes."""
    view = copy.copy(head)
    view.target = target  # type: ignore[attr-defined]
    return view


class OnLastState:
    """What heads have in common that read the target's last state and answer through its output head.

    only: int64 [V'], the tokens it proposes where those are not all: FR-Spec (arXiv 2502.14856), section 3.
    """

    target: Target
    only: Tensor | None = None

    def proposing(self, only: Sequence[int]) -> Self:
        """The same head that proposes these tokens alone."""
        view = copy.copy(self)
        view.only = torch.tensor(only, device=self.target.device)
        return view

    def computing(self, dtype: torch.dtype) -> Self:
        """See Drafter.computing."""
        return on_target(self, self.target.computing(dtype))

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """The target's last hidden state after its final norm, [T,h]."""
        return states[self.target.layers]

    def enter(self, features: Tensor) -> Tensor:
        """As it is: the first draft row and all later ones read the same kind of state."""
        return features

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h] -> [...,V], through the target's lm_head; -inf for tokens that it does not propose."""
        logits = self.target.logits(g)
        if self.only is None:
            return logits
        return torch.full_like(logits, float("-inf")).index_copy(-1, self.only, logits[..., self.only])
