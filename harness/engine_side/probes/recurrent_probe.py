"""The recurrent states that a target's forward finds for its requests, where its layers keep some.

A request has a slot in SGLang's pool of states; its layers continue from what lies there. What a verify computed behind
refused tokens must not be in it when the next forward begins. Of each state a few sums are kept
(`both_sides.projections`). On a GPU this waits for the device, at each forward of a target with such a pool.

Engine side: torch only. It must not change any value SGLang computes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...both_sides.projections import OF_A_HEAD, OF_A_ROW, weights


def recurrent_of(runner: Any, forward_batch: Any, count: int, *, prompt: bool) -> dict[str, list[Any]] | None:
    """What lies in the slot of each of the `count` requests of a forward; None where there is no such pool.

    committed: positions before the forward's own rows. state [L*H*2], conv [L*w*8]: sums of the L layers' matrices of H
    heads, and of the w rows that their convolutions keep. What is not finite is None.
    """
    requests = runner.req_to_token_pool
    pool = getattr(requests, "mamba_pool", None)
    if pool is None:
        return None
    starts = (forward_batch.extend_prefix_lens if prompt else forward_batch.seq_lens)[:count].tolist()
    slots = requests.get_mamba_indices(forward_batch.req_pool_indices[:count])
    translate = getattr(requests, "translate_mamba_indices", None)
    slots = (slots if translate is None else translate(slots)).long()
    states, rows = pool.mamba_cache.temporal[:, slots].float(), pool.mamba_cache.conv[0][:, slots].float()
    heads = torch.einsum("lnhvk,pvk->nlhp", states, _weights(OF_A_HEAD, states.shape[-2:], states.device))
    kept = torch.einsum("lncw,pc->nlwp", rows, _weights(OF_A_ROW, rows.shape[2:3], rows.device))
    return {"committed": starts, "state": _plain(heads), "conv": _plain(kept)}


def _weights(count: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """float32 [count,*shape]."""
    return torch.from_numpy(weights(count, math.prod(shape))).to(device).view(count, *shape)


def _plain(sums: torch.Tensor) -> list[list[float | None]]:
    """[n,…] -> a list a request, of as many digits as float32 has."""
    return [[float(f"{one:.8g}") if math.isfinite(one) else None for one in line] for line in sums.flatten(1).tolist()]
