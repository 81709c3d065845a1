"""A sparse attention indexer: which rows a row attends where it sees more than its layer takes.

Written from DeepSeek-V3.2 (arXiv 2512.02556) section 2.1: the score of a row s for a row t is the sum over index heads
of a weight times relu(q · k), with weights and queries of t, one key of s for all heads, and the best are taken. What
the paper does not say, that queries come from the latent one, keys are normed, and the first dimensions of both turn in
halves, is as Hugging Face's module has it. Scores are computed in the dtype of the rows here and not in FP8: who is
asked before a choice counts is `routing_ties.Watch`, as for routers. This module must not know a model.

Shapes: m new rows, J rows in all, h hidden width, c width of a query's latent, H index heads, d width of an index key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.attention import SCORES
from reference.checkpoint import Weights
from reference.model import linear
from reference.rotation import Rotation
from reference.routing_ties import settled

#: Of the norm of keys.
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSizes:
    """most: rows that a row attends at most."""

    hidden: int
    q_rank: int
    heads: int
    width: int
    most: int
    rotation: Rotation


class Indexer:
    """Of one layer."""

    def __init__(self, weights: Weights, prefix: str, sizes: IndexSizes) -> None:
        c, take = sizes, weights.take
        self.sizes = c
        self.queries = take(f"{prefix}wq_b.weight", c.heads * c.width, c.q_rank)
        self.key = take(f"{prefix}wk.weight", c.width, c.hidden)
        self.norm = take(f"{prefix}k_norm.weight", c.width), take(f"{prefix}k_norm.bias", c.width)
        self.weigh = take(f"{prefix}weights_proj.weight", c.heads, c.hidden)

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [m,h], positions int64 [m] -> [m,d], turned."""
        weight, bias = (one.to(x.dtype) for one in self.norm)
        keys = torch.nn.functional.layer_norm(linear(x, self.key), (self.sizes.width,), weight, bias, EPS)
        return self.sizes.rotation.turn(keys[:, None, :], positions)[:, 0]

    def queries_of(self, asking: Tensor, positions: Tensor) -> Tensor:
        """asking [m,c], positions int64 [m] -> [m,H,d], turned."""
        c = self.sizes
        return c.rotation.turn(linear(asking, self.queries).view(len(asking), c.heads, c.width), positions)

    def scores(self, x: Tensor, asking: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """x [m,h], asking [m,c] of rows that choose, keys [J,d] -> [m,J]."""
        c, q = self.sizes, self.queries_of(asking, positions)
        weights = linear(x, self.weigh) * (c.heads * c.width) ** -0.5
        step = max(1, SCORES // (c.heads * len(keys)))
        parts = zip(torch.split(q, step), torch.split(weights, step), strict=True)
        return torch.cat([((one @ keys.T).relu() * by[:, :, None]).sum(dim=1) for one, by in parts])

    def chosen(self, scores: Tensor, seen: Tensor) -> Tensor:
        """scores [m,J], seen bool [m,J] -> bool [m,J]: the best rows of those that each row sees."""
        values = scores.masked_fill(~seen, float("-inf"))
        best = settled(self, values, values.topk(min(self.sizes.most, values.shape[1]), dim=-1).indices)
        return torch.zeros_like(seen).scatter_(1, best, True) & seen
