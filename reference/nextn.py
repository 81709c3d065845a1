"""One next-token layer behind a target, run step by step: its own output is what its next row reads (NextN, MTP).

Written from DeepSeek-V3 (arXiv 2412.19437) section 2.2: row j joins the token at j+1 and the state at j, each through a
norm of its own, runs one decoder layer over that, and a last norm makes what the target's head reads; that is what the
row hands on, too. Published families call the parts otherwise, and differ in what `Join` says. Embedding and head are
the target's; a layer that brings other ones is refused. This module must not look at a trace.

Shapes: m new rows, h hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.attention import Kept, Sight
from reference.checkpoint import CheckpointError, Weights
from reference.model import Layer, OnLastState, Target, linear, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """How a family calls and does it. final: None where it is the target's last norm.

    state_first: whether the state stands before the token in the join. masked: whether the token of the row at position
    0 counts as zeros. copies: what the layer's copies of the target's embedding and head are called, if it has them.
    """

    token_norm: str
    state_norm: str
    join: str
    final: str
    state_first: bool = False
    masked: bool = False
    copies: Mapping[str, str] | None = None


def behind(layers: int) -> Join:
    """As DeepSeek, GLM and others store it: one more layer than the target has."""
    prefix = f"model.layers.{layers}."
    return Join(
        token_norm=f"{prefix}enorm.weight",
        state_norm=f"{prefix}hnorm.weight",
        join=f"{prefix}eh_proj.weight",
        final=f"{prefix}shared_head.norm.weight",
        copies={"embed": f"{prefix}embed_tokens.weight", "head": f"{prefix}shared_head.head.weight"},
    )


#: Xiaomi's MiMo-7B: the state first, and the token of the first row counts as zeros, as in the vLLM that it published.
MIMO = Join(
    token_norm="model.mtp_layers.0.token_layernorm.weight",
    state_norm="model.mtp_layers.0.hidden_layernorm.weight",
    join="model.mtp_layers.0.input_proj.weight",
    final="model.mtp_layers.0.final_layernorm.weight",
    state_first=True,
    masked=True,
)
#: Qwen3-Next and later Qwen models.
QWEN = Join(
    token_norm="mtp.pre_fc_norm_embedding.weight",
    state_norm="mtp.pre_fc_norm_hidden.weight",
    join="mtp.fc.weight",
    final="mtp.norm.weight",
)
#: ERNIE 4.5: its last norm is the main model's (Baidu's FastDeploy and ERNIE repositories).
ERNIE = Join(
    token_norm="model.mtp_emb_norm.0.weight",
    state_norm="model.mtp_hidden_norm.0.weight",
    join="model.mtp_linear_proj.0.weight",
    final="model.norm.weight",
)


class NextNHead(OnLastState):
    """See the module. layer: the decoder layer; eps: of the norms around it."""

    algorithm = "EAGLE"
    provider = "paper"
    notes: Sequence[str] = ()

    def __init__(self, weights: Weights, join: Join, layer: Layer, target: Target, eps: float) -> None:
        h, take = target.hidden, weights.take
        self.target, self.layer, self.eps = target, layer, eps
        self.states: tuple[int, ...] = (target.layers,)
        self.state_first, self.masked = join.state_first, join.masked
        self.token_norm, self.state_norm = take(join.token_norm, h), take(join.state_norm, h)
        self.join, self.final_norm = take(join.join, h, 2 * h), take(join.final, h)
        for what, name in (join.copies or {}).items():
            if name in weights:
                self._is_the_targets(weights, what, name)

    def _is_the_targets(self, weights: Weights, what: str, name: str) -> None:
        own = weights.take(name, self.target.vocab, self.target.hidden)
        theirs = getattr(self.target, {"embed": "embedding", "head": "head"}[what], None)
        if theirs is not None and not torch.equal(own, theirs):
            raise CheckpointError(
                f"{weights.path}: {name!r} is not the target's; this reference builds layers that share the target's"
            )

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sight: Sight, kept: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        """See Head.forward."""
        embedded = self.target.embed(tokens)
        if self.masked:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        token, state = rms_norm(embedded, self.token_norm, self.eps), rms_norm(hidden, self.state_norm, self.eps)
        parts = (state, token) if self.state_first else (token, state)
        g, kept = self.layer.forward(linear(torch.cat(parts, dim=-1), self.join), positions, sight, kept)
        return rms_norm(g, self.final_norm, self.eps), kept
