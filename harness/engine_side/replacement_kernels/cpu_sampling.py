"""Sampled tree verification in plain torch, for releases whose kernels have no CPU build.

Engine side: torch only. Ours, written from what the tensors mean: inverse-transform sampling of the target's
distribution along a tree (speculative sampling, arXiv 2211.17192; several candidates a step, arXiv 2305.09781), with
uniforms that the release has drawn. Where these run, the verify kernel is *not* the release's own, and the trace
header says so.
"""

from __future__ import annotations

from typing import Any

import torch


def verify_sampled(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    **_kwargs: Any,
) -> None:
    """Walk each tree by its uniforms; same in/out tensors as SGLang's function.

    candidates, uniform_samples [b, n]; uniform_samples_for_final_sampling [b]; target_probs [b, n, V]. The children of
    a node share its uniform: they divide the unit interval among them in order, and one beyond them all refuses them.
    """
    for b in range(candidates.shape[0]):
        node, accepted = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        refused: list[int] = []
        while accepted + 1 < accept_index.shape[1]:
            refused, child = [], int(retrive_next_token[b, node])
            uniform, taken = float(uniform_samples[b, node]), 0.0
            while child != -1:
                token = int(candidates[b, child])
                mass = float(target_probs[b, node, token])
                taken += mass
                if mass > 0 and (uniform < taken / threshold_acc or mass >= threshold_single):
                    break
                refused.append(token)
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            predicts[int(retrive_index[b, node])] = candidates[b, child]
            accepted += 1
            accept_index[b, accepted] = retrive_index[b, child]
            node, refused = child, []
        left = target_probs[b, node].clone()
        left[refused] = 0.0
        predicts[int(retrive_index[b, node])] = _draw(left, float(uniform_samples_for_final_sampling[b]))
        accept_token_num[b] = accepted


def _draw(mass: torch.Tensor, uniform: float) -> int:
    """The first token at which the running sum of mass [V] exceeds uniform · the whole; else the last possible one."""
    running = mass.cumsum(0)
    above = torch.nonzero(running > uniform * running[-1])
    return int(above[0]) if len(above) else int(torch.nonzero(mass)[-1])


def renorm_top_k(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """probs [r, V] with all but each row's top_k [r] likeliest tokens at zero, ties kept, divided by what is left."""
    kept = top_k.reshape(-1, 1).clamp(max=probs.shape[-1]).long()
    least = probs.sort(dim=-1, descending=True).values.gather(1, kept - 1)
    return _renormed(probs, probs >= least)


def renorm_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [r, V] with only the smallest set of likeliest tokens whose mass reaches top_p [r], divided by its mass."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    keep = torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, before < top_p.reshape(-1, 1))
    return _renormed(probs, keep)


def _renormed(probs: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    kept = probs * keep
    return kept / kept.sum(-1, keepdim=True)
