"""The gated delta rule over a prompt in plain torch: SGLang's chunked kernel takes no float32.

Engine side: torch only. Ours, written from the recurrence (Gated DeltaNet, arXiv 2412.06464, section 3), one row after
the other. Which slot of the pool a request reads and writes, and from which row on, stays SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch

#: Rows between two states that are handed out for checkpoints.
CHUNK = 64
#: What keeps a key of length zero from being divided by it.
EPS = 1e-6


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Same in and out as SGLang's function: output [1,T,H,V], None, and the states [1,C,H,V,K] chunks begin with.

    q, k [1,T,G,K], v [1,T,H,V], g (the decay's logarithm) and beta [1,T,H]; initial_state [slots,H,V,K], of which
    initial_state_indices [n] are the sequences'; cu_seqlens [n+1] their rows. A slot below zero is a padded request's.
    """
    groups = v.shape[2] // k.shape[2]
    keys, queries = (
        (_unit(x[0]) if use_qk_l2norm_in_kernel else x[0]).repeat_interleave(groups, dim=1).float() for x in (k, q)
    )
    factor, decay = scale or k.shape[-1] ** -0.5, g[0].float().exp()
    out, begun, bounds = torch.zeros_like(v), list[torch.Tensor](), cu_seqlens.tolist()
    for number, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float() if slot >= 0 else torch.zeros_like(initial_state[0], dtype=torch.float32)
        for row in range(bounds[number], bounds[number + 1]):
            if (row - bounds[number]) % CHUNK == 0:
                begun.append(state)
            state = state * decay[row][:, None, None]
            known = (state * keys[row][:, None, :]).sum(dim=-1)
            new = beta[0, row].float()[:, None] * (v[0, row].float() - known)
            state = state + new[:, :, None] * keys[row][:, None, :]
            out[0, row] = factor * (state * queries[row][:, None, :]).sum(dim=-1)
        if inplace_update and slot >= 0:
            initial_state[slot] = state
    return out, None, torch.stack(begun)[None].to(k.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x [...,K] of length one."""
    return x * torch.rsqrt(x.float().pow(2).sum(dim=-1, keepdim=True) + EPS).to(x.dtype)
