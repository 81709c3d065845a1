"""Experts of which each squares what its rectifier lets through (Nemotron-H): SGLang has no such ones on a CPU.

Engine side: torch only. Ours, written from the model (arXiv 2504.03624). Which experts a row goes to, and with what
weight, stays SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch


def squared_experts(
    layer: Any, x: torch.Tensor, choice: tuple[torch.Tensor, torch.Tensor, Any], config: Any
) -> torch.Tensor:
    """x [T,h] -> [T,h]. layer: w13_weight [E,i,h] and w2_weight [E,h,i]; choice: weights and experts [T,k].

    config: its `routed_scaling_factor` is left to whoever runs experts, as SGLang's runners on a GPU do it.
    """
    weights, experts = choice[0], choice[1]
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in experts.unique().tolist():
        rows, place = (experts == expert).nonzero(as_tuple=True)
        up = torch.nn.functional.linear(x[rows], layer.w13_weight[expert]).relu().square()
        said = torch.nn.functional.linear(up, layer.w2_weight[expert]).float()
        out.index_add_(0, rows, said * weights[rows, place, None].float())
    return (out * (config.routed_scaling_factor or 1.0)).to(x.dtype)
