"""What a scheduler holds, read off it: its requests, and the levels of its pools.

Engine side: standard library only. It must not change anything of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

from ..probes.names import free_lists
from ..probes.pool_probe import WINDOW_SLOTS
from ..probes.recorder import plain_rid

#: Where a request can be between a prefill and a decode side.
QUEUES = (
    "disagg_prefill_bootstrap_queue.queue",
    "disagg_prefill_inflight_queue",
    "disagg_decode_prealloc_queue.queue",
    "disagg_decode_prealloc_queue.retracted_queue",
    "disagg_decode_transfer_queue.queue",
)


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Who is running, waiting or half prefilled; idle if there is nobody. sent: of streams with an interval."""
    running = [plain_rid(req.rid) for req in scheduler.running_batch.reqs]
    waiting = [plain_rid(req.rid) for req in scheduler.waiting_queue]
    chunked = getattr(scheduler, "chunked_req", None)
    last = scheduler.last_batch
    # The loop drops its last batch one step late; until then SGLang itself refuses to flush.
    in_last = last is not None and not last.is_empty()
    pending = getattr(scheduler, "result_queue", None)
    moving = in_transit(scheduler)
    sent = _sent(scheduler.running_batch.reqs)
    return {
        "running": running,
        "waiting": waiting,
        "moving": moving,
        "chunked": None if chunked is None else plain_rid(chunked.rid),
        "idle": not (running or waiting or moving or chunked or in_last or pending),
        **({"sent": sent} if sent else {}),
    }


def _sent(requests: list[Any]) -> dict[str, list[int]]:
    """Tokens that left for the client, and all that there are, of each stream that asks for an interval."""
    return {
        plain_rid(req.rid): [int(req.send_token_offset), len(req.output_ids)]
        for req in requests
        if req.stream and req.sampling_params.stream_interval and not req.finished()
    }


def in_transit(scheduler: Any) -> list[str]:
    """Requests in the queues of a hand-over between a prefill and a decode side; none where there are no sides."""
    queues = [reduce(lambda owner, name: getattr(owner, name, None), path.split("."), scheduler) for path in QUEUES]
    found = [entry for queue in queues for entry in queue or ()]
    return [plain_rid(getattr(entry, "req", entry).rid) for entry in found]


#: Of a hierarchical cache's controller: copies that were asked for, and those of which SGLang has not seen the end.
COPIES = ("write_queue", "load_queue", "ack_write_queue", "ack_load_queue")


def being_copied(cache: Any, *, pool: str = "") -> int:
    """Rows of the prefix cache that nobody may evict, as long as some are copied: it looks once a step if they are.

    pool: `swa_` for those of layers with sliding windows.
    """
    controller = getattr(cache, "cache_controller", None)
    copied = any(getattr(controller, name, None) for name in COPIES)
    return int(getattr(cache, f"{pool}protected_size")()) if copied else 0


def pool_level(scheduler: Any) -> dict[str, int]:
    """Token slots of the KV pool: free, held by the prefix cache, and all; free rows of a hand-over's metadata.

    window_free, window_evictable: the same of the pool that layers with sliding windows have, where they have one.
    twice: of the free ones those that its lists name once more, or that the prefix cache holds.
    """
    rows = getattr(scheduler, "req_to_metadata_buffer_idx_allocator", None)
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    windows = getattr(allocator, WINDOW_SLOTS, None) is not None
    evictable = cache.full_evictable_size() if windows else cache.evictable_size()
    return {
        "free": int(allocator.full_available_size() if windows else allocator.available_size()),
        "evictable": int(evictable if isinstance(evictable, int) else evictable[0]) + being_copied(cache),
        **(
            {
                "window_free": int(allocator.swa_available_size()),
                "window_evictable": int(cache.swa_evictable_size()) + being_copied(cache, pool="swa_"),
            }
            if windows
            else {}
        ),
        "twice": _listed_again(getattr(allocator, "full_attn_allocator", allocator), () if windows else _held(cache)),
        "total": int(scheduler.max_total_num_tokens),
        **({} if rows is None else {"metadata": int(rows.available_size())}),
    }


def _held(cache: Any) -> list[int]:
    """Slots of a prefix cache that keeps all of them on the device and evicts them by token."""
    size, every = cache.evictable_size(), getattr(cache, "all_values_flatten", None)
    if every is None or not isinstance(size, int) or size == 0 or getattr(cache, "cache_controller", None) is not None:
        return []
    return list(every().tolist())


def _listed_again(allocator: Any, held: Iterable[int]) -> int:
    """Token slots of the entries in an allocator's free lists that are there already, or held; 0 without lists."""
    every = [page for pages in free_lists(allocator) for page in pages.tolist()]
    size = int(allocator.page_size)
    both = {slot // size for slot in held} & set(every)
    return (len(every) - len(set(every)) + len(both)) * size
