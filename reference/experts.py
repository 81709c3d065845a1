"""Gated MLPs and mixtures of experts: which experts a row goes to, with what weight, and what they say.

Sources: Mixtral (arXiv 2401.04088) section 2.1; Qwen2-MoE (arXiv 2407.10671) section 2.2.2 and its gated shared expert;
DeepSeekMoE in DeepSeek-V2 (arXiv 2405.04434) section 2.2 and DeepSeek-V3 (arXiv 2412.19437) section 2.1.2, whose bias
takes part in the choice only; ERNIE 4.5's technical report, the same bias over a softmax; the gpt-oss model card
(arXiv 2508.10925) section 2 and its published code for the clamped SwiGLU. Weights are named as they are published:
per expert or all experts in one tensor.

Routing is float32 or wider whatever the rows are, and only the rows that chose an expert go through it. A choice is
discrete: rows whose scores nearly tie may go elsewhere in a narrower dtype, which is rounding (see
reference.routing_ties).

Shapes: T rows, h hidden width, i width of an expert, E experts, k chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from reference.model import RowWise, linear
from reference.routing_ties import settled

#: The scaled sigmoid that gpt-oss takes in place of SiLU's.
SWIGLU_ALPHA = 1.702


class Source(Protocol):
    """Named tensors, as reference.checkpoint.Weights has them."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int) -> Tensor: ...


class Keyed(Protocol):
    """A config, as raw as json gives it or with a note of what was read."""

    def __getitem__(self, key: str, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How rows choose among E experts.

    groups, kept: experts stand in `groups` groups of E/groups; a row chooses within its `kept` best ones.
    group_best: how many of a group's best scores are its own score (DeepSeek-V2: 1, V3: 2).
    normed: whether the chosen weights are divided by their sum. scaling: what they are multiplied by afterwards.
    """

    experts: int
    chosen: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normed: bool = False
    scaling: float = 1.0
    groups: int = 1
    kept: int = 1
    group_best: int = 1

    @staticmethod
    def of_deepseek_v3(keys: Keyed) -> Routing:
        """Sigmoid scores, and groups by the sum of their best two; by DeepSeek-V3's names, KeyError for one missing."""
        return Routing(
            experts=keys["n_routed_experts"],
            chosen=keys["num_experts_per_tok"],
            score="sigmoid",
            normed=keys["norm_topk_prob"],
            scaling=float(keys["routed_scaling_factor"]),
            groups=keys["n_group"],
            kept=keys["topk_group"],
            group_best=2,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """experts int64 [T,k], and their weights [T,k]."""

    experts: Tensor
    weights: Tensor


class Router:
    """Scores E experts for each row. bias [E] adds to the logits, correction [E] to the scores in the choice only."""

    def __init__(
        self, weight: Tensor, routing: Routing, *, bias: Tensor | None = None, correction: Tensor | None = None
    ) -> None:
        self.weight, self.bias, self.correction, self.routing = weight, bias, correction, routing

    def forward(self, x: Tensor) -> Choice:
        """x [T,h] -> which experts."""
        routing = self.routing
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        logits = linear(x.to(wide), self.weight.to(wide), bias)
        score = logits.softmax(dim=-1) if routing.score == "softmax" else logits.sigmoid()
        choosing = score if self.correction is None else score + self.correction.to(wide)
        allowed = self._within_groups(choosing)
        chosen = allowed.topk(routing.chosen, dim=-1).indices
        chosen = settled(self, logits if choosing is score and allowed is choosing else allowed, chosen)
        weights = score.gather(-1, chosen)
        if routing.normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Choice(experts=chosen, weights=weights * routing.scaling)

    def _within_groups(self, choosing: Tensor) -> Tensor:
        """choosing [T,E] with -inf outside each row's best groups."""
        routing = self.routing
        if routing.groups == 1:
            return choosing
        grouped = choosing.reshape(len(choosing), routing.groups, -1)  # [T,groups,E/groups]
        best = grouped.topk(routing.group_best, dim=-1).values.sum(-1).topk(routing.kept, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside[..., None], float("-inf")).flatten(-2)


class GatedMlp:
    """down(silu(gate x) * (up x)). names: of gate, up and down."""

    def __init__(
        self,
        weights: Source,
        prefix: str,
        *,
        hidden: int,
        width: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
    ) -> None:
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        named = list(zip(names, shapes, strict=True))
        self.gate, self.up, self.down = (weights.take(f"{prefix}{name}.weight", *shape) for name, shape in named)
        biases = [weights.take(f"{prefix}{name}.bias", shape[0]) if bias else None for name, shape in named]
        self.gate_bias, self.up_bias, self.down_bias = biases

    def forward(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]."""
        gate, up = linear(x, self.gate, self.gate_bias), linear(x, self.up, self.up_bias)
        return linear(silu(gate) * up, self.down, self.down_bias)


class ClampedMlp:
    """An expert of gpt-oss: gate and up interleaved in one matrix [h,2i], both clamped, up raised by one.

    down [i,h]; biases [2i] and [h].
    """

    def __init__(self, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor, limit: float) -> None:
        self.gate_up, self.gate_up_bias, self.down, self.down_bias = gate_up, gate_up_bias, down, down_bias
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]."""
        both = linear(x, self.gate_up.T, self.gate_up_bias)
        gate, up = both[:, ::2], both[:, 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return linear(gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1), self.down.T, self.down_bias)


class SplitMlp:
    """A gated MLP out of a tensor that has gate above up, [2i,h], and down [h,i]."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]."""
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, self.down)


class Experts:
    """A mixture: routed experts, weighed, and shared ones that every row goes through.

    shared_gate [1,h]: a row's sigmoid of it weighs what the shared expert says (Qwen2-MoE).
    """

    def __init__(
        self, router: Router, routed: list[RowWise], *, shared: RowWise | None = None, shared_gate: Tensor | None = None
    ) -> None:
        self.router, self.routed = router, routed
        self.shared, self.shared_gate = shared, shared_gate

    def forward(self, x: Tensor) -> Tensor:
        """x [T,h] -> [T,h]."""
        choice = self.router.forward(x)
        wide = torch.zeros_like(x, dtype=choice.weights.dtype)
        for expert in sorted(set(choice.experts.flatten().tolist())):
            rows, place = (choice.experts == expert).nonzero(as_tuple=True)
            said = self.routed[expert].forward(x[rows]) * choice.weights[rows, place, None]
            wide.index_add_(0, rows, said)
        routed = wide.to(x.dtype)
        return routed if self.shared is None else routed + self._shared(x, self.shared)

    def _shared(self, x: Tensor, shared: RowWise) -> Tensor:
        said = shared.forward(x)
        return said if self.shared_gate is None else linear(x, self.shared_gate).sigmoid() * said


def routed_mlps(
    weights: Source,
    prefix: str,
    *,
    experts: int,
    hidden: int,
    width: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[RowWise]:
    """Experts `prefix`0., `prefix`1. … or, where a checkpoint has them in one tensor, slices of it."""
    fused = f"{prefix}gate_up_proj"
    if fused not in weights:
        return [GatedMlp(weights, f"{prefix}{e}.", hidden=hidden, width=width, names=names) for e in range(experts)]
    gate_up = weights.take(fused, experts, 2 * width, hidden)
    down = weights.take(f"{prefix}down_proj", experts, hidden, width)
    return [SplitMlp(gate_up[e], down[e]) for e in range(experts)]
