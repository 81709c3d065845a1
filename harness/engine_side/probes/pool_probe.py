"""What pools beside the KV pool hold for each request when its target's forward begins: windows, and recurrent states.

Where layers with a window have a pool of their own, a position has a slot there as long as SGLang thinks that some
window reaches it: `full_to_swa_index_mapping` leads from the slot that all layers share to that one. Nothing is read of
what lies in the slots.

A request has a slot in SGLang's pool of states; its layers continue from what lies there. What a verify computed behind
refused tokens must not be in it when the next forward begins. Of each state a few sums are kept
(`both_sides.projections`).

Engine side: torch only. It must not change any value SGLang computes. On a GPU this waits for the device, at each
forward of a target with such a pool.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...both_sides.projections import OF_A_HEAD, OF_A_ROW, weights
from ..hooks import Original
from .names import free_lists
from .recorder import Recorder

#: Of an allocator with a pool for windows: slot -> slot in that pool, 0 for none.
WINDOW_SLOTS = "full_to_swa_index_mapping"


class PoolProbe:
    """Messages 'window' and 'recurrent', where a target has such pools."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begins(self, runner: Any, forward_batch: Any, phase: str) -> None:
        """A forward of the target, with requests, is about to run."""
        held = window_of(runner, forward_batch, prompt=phase == "PREFILL")
        if held is not None:
            self._put("window", phase, {"window": int(runner.sliding_window_size) + 1} | held)
        if phase != "PREFILL":
            self._states(runner, forward_batch, phase)

    def states_copied(self, original: Original) -> Original:
        """A prompt's forward takes states out of the prefix cache itself, before its layers run."""

        def call(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(runner, forward_batch, *args, **kwargs)
            current = self._recorder.round
            if not runner.is_draft_worker and current is not None and current.rids and current.mode == "PREFILL":
                self._states(runner, forward_batch, "PREFILL")
            return result

        return call

    def _states(self, runner: Any, forward_batch: Any, phase: str) -> None:
        assert self._recorder.round is not None
        held = recurrent_of(runner, forward_batch, len(self._recorder.round.rids), prompt=phase == "PREFILL")
        if held is not None:
            self._put("recurrent", phase, held)

    def _put(self, event: str, phase: str, held: dict[str, Any]) -> None:
        current = self._recorder.round
        assert current is not None
        place = {"ev": event, "round": current.index, "rids": current.rids, "attempts": current.attempts}
        self._recorder.put(place | {"phase": phase} | held)


def window_of(runner: Any, forward_batch: Any, *, prompt: bool) -> dict[str, list[int]] | None:
    """What a forward's requests hold in the pool for windows, an entry a request; None where there is no such pool.

    committed: positions before the forward's own rows; lens: how many those are. held_from: the first position from
    which on every one has a slot, up to the last of the forward's rows. gone: positions before the rows that have none.
    shared: positions whose slot is another position's too, of whichever request.
    """
    allocator = runner.token_to_kv_pool_allocator
    if getattr(allocator, WINDOW_SLOTS, None) is None:
        return None
    starts = (forward_batch.extend_prefix_lens if prompt else forward_batch.seq_lens).tolist()
    rows = forward_batch.extend_seq_lens.tolist() if prompt else _even(forward_batch, len(starts))
    table, pools = runner.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.tolist()
    slots = [table[pool, : start + own].long() for pool, start, own in zip(pools, starts, rows, strict=True)]
    held = [_held(allocator, one) for one in slots]
    twice = _twice(slots, held)
    return {
        "committed": starts,
        "lens": rows,
        "held_from": [_behind_last(one == 0) for one in held],
        "gone": [int((one[:start] == 0).sum()) for one, start in zip(held, starts, strict=True)],
        "shared": [int(torch.isin(one, twice).sum()) for one in held],
    }


def _even(forward_batch: Any, requests: int) -> list[int]:
    """Rows of each request in a verify."""
    return [len(forward_batch.input_ids) // requests] * requests


def _held(allocator: Any, slots: torch.Tensor) -> torch.Tensor:
    """int64, a slot of the pool for windows for each of `slots`; 0 where there is none, or where it is a free one."""
    pool, page = allocator.swa_attn_allocator, int(allocator.page_size)
    found = getattr(allocator, WINDOW_SLOTS)[slots].long()
    free = torch.cat([pages.long() for pages in free_lists(pool)])
    return found.masked_fill(torch.isin(found // page, free) | (found < 0), 0)


def _twice(slots: list[torch.Tensor], held: list[torch.Tensor]) -> torch.Tensor:
    """Slots of the pool for windows that stand for several of those that all layers share; 0 is none of them."""
    pairs = torch.unique(torch.stack((torch.cat(held), torch.cat(slots))), dim=1)[0]
    found, counts = torch.unique(pairs, return_counts=True)
    return found[(counts > 1) & (found > 0)]


def _behind_last(true: torch.Tensor) -> int:
    """The index behind the last that is true."""
    places = true.nonzero()
    return int(places[-1]) + 1 if len(places) else 0


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
