"""What the KV pool of sliding windows holds for each request when its target's forward begins.

Where layers with a window have a pool of their own, a position has a slot there as long as SGLang thinks that some
window reaches it: `full_to_swa_index_mapping` leads from the slot that all layers share to that one. Nothing is read of
what lies in the slots. On a GPU this waits for the device, at each forward of a target with such a pool.

Engine side: torch only. It must not change any value SGLang computes.
"""

from __future__ import annotations

from typing import Any

import torch

#: Of an allocator with a pool for windows: slot -> slot in that pool, 0 for none.
WINDOW_SLOTS = "full_to_swa_index_mapping"


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
    lists = [pages for name in ("free_pages", "release_pages") if (pages := getattr(pool, name, None)) is not None]
    free = torch.cat([pages.long() for pages in lists])
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
