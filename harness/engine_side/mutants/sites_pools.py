"""Where mutants of pools beside that of all layers act: of sliding windows, of recurrent states, and of the host.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..hooks import Original
from ..probes.attention_probe import BACKEND
from .armed import ArmedMutants, Place, Sites, one_each
from .registry import Share, Values

#: What gives slots back while their request runs, newest release first.
FREES = ("free_swa_segment", "free_swa")
RECURRENT = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
COMMIT = "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify"
#: Of that call: the tree node, or the place in the chain, behind which a request's state is kept, -1 for none.
STEPS = "last_correct_step_indices"
HOST = "sglang.srt.mem_cache.pool_host"
#: Module -> class whose rows are copied.
KINDS = {f"{HOST}.mha": "MHATokenToKVPoolHost", f"{HOST}.mla": "MLATokenToKVPoolHost"}


class WindowSites(Sites):
    """Where the pool of sliding windows is its own: what attention is told to read, and what is given back."""

    _evicting = False

    def places(self) -> Iterator[Place]:
        pool = type(self._scheduler.token_to_kv_pool_allocator)
        free = next(name for name in FREES if hasattr(pool, name))
        yield Place(BACKEND, "update_sliding_window_buffer", self._reads)
        yield Place("sglang.srt.managers.schedule_batch", "ScheduleBatch._evict_swa", self._evict)
        yield Place(pool.__module__, f"{pool.__name__}.{free}", self._free)

    def _reads(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        ends, slots, lens, starts = original(*args, **kwargs)
        if not self._mutants.at("window"):
            return ends, slots, lens, starts
        counts, whole = lens.tolist(), slots.clone()
        used = sum(counts)
        shares = [Share("", sum(counts[:i]), count) for i, count in enumerate(counts)]
        changed = self._mutants.apply("window", {"slots": slots[:used]}, shares=shares)
        whole[:used] = changed.get("slots", slots[:used])
        return ends, whole, lens, starts

    def _evict(self, original: Original, batch: Any, req: Any, length: int, *args: Any, **kwargs: Any) -> Any:
        changed = self._mutants.apply("eviction", {"length": torch.tensor(length)}, shares=one_each([req]))
        self._evicting = True
        try:
            return original(batch, req, int(changed.get("length", length)), *args, **kwargs)
        finally:
            self._evicting = False

    def _free(self, original: Original, pool: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
        if self._evicting:
            slots = self._mutants.apply("window-free", {"slots": slots}).get("slots", slots)
        return original(pool, slots, *args, **kwargs)


class RecurrentSites(Sites):
    """Where a target keeps recurrent states: which of a verify's becomes the request's own."""

    def places(self) -> Iterator[Place]:
        yield Place(RECURRENT, COMMIT, self._commit)

    def _commit(self, original: Original, backend: Any, *args: Any, **kwargs: Any) -> Any:
        steps, rest = (kwargs.pop(STEPS), args) if STEPS in kwargs else (args[0], args[1:])
        current = self._recorder.round
        rids = [] if current is None else current.rids
        shares = [Share(rid, number, 1) for number, rid in enumerate(rids)]
        last = int(self._scheduler.server_args.speculative_num_draft_tokens) - 1  # step of a verify
        values = {"steps": steps, "last": torch.tensor(last)}
        changed = self._mutants.apply("commit", values, shares=shares)
        return original(backend, changed.get("steps", steps), *rest, **kwargs)


class HostSites(Sites):
    """Of a hierarchical cache: what is copied to and from the host and storage, and the host's slots."""

    def __init__(self, mutants: ArmedMutants, scheduler: Any) -> None:
        super().__init__(mutants, scheduler)
        controller = scheduler.tree_cache.cache_controller
        self._target, whole = controller.mem_pool_device, controller.mem_pool_host
        # in newer releases a group, of which the target's pool is one
        self._targets_rows = getattr(getattr(whole, "anchor_entry", None), "host_pool", whole)

    def places(self) -> Iterator[Place]:
        for module, kind in KINDS.items():
            yield Place(module, f"{kind}.backup_from_device_all_layer", self._store)
            yield Place(module, f"{kind}.load_to_device_per_layer", self._load)
            yield Place(module, f"{kind}.get_data_page", self._write)
            yield Place(module, f"{kind}.set_from_flat_data_page", self._read)
        yield Place(f"{HOST}.base", "HostKVCache.alloc", self._alloc)

    def _store(self, original: Original, host: Any, pool: Any, slots: Any, device: Any, *args: Any) -> Any:
        changed = self._mutants.apply("host-store", self._values(pool, slots, device))
        return original(host, pool, changed.get("host", slots), changed.get("device", device), *args)

    def _load(
        self, original: Original, host: Any, pool: Any, slots: Any, device: Any, layer: int, *args: Any, **kwargs: Any
    ) -> Any:
        values = self._values(pool, slots, device, packed=bool(kwargs.get("is_draft")))
        changed = self._mutants.apply("host-load", values | {"layer": torch.tensor(layer)})
        where = changed.get("host", slots), changed.get("device", device), int(changed.get("layer", layer))
        return original(host, pool, *where, *args, **kwargs)

    def _write(self, original: Original, host: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        return original(host, self._page("storage-write", host, first)[0], *args, **kwargs)

    def _read(self, original: Original, host: Any, first: Any, page: Any) -> None:
        for slot in self._page("storage-read", host, first):
            original(host, slot, page)

    def _page(self, site: str, host: Any, first: Any) -> list[int]:
        """Where a page of a host's pool begins, by whom it is written or read; none for a page that is not read."""
        values = {"host": torch.tensor([int(first)]), "draft": torch.tensor(host is not self._targets_rows)}
        slots: list[int] = self._mutants.apply(site, values).get("host", values["host"]).tolist()
        return slots

    def _alloc(self, original: Original, host: Any, *args: Any, **kwargs: Any) -> Any:
        slots = original(host, *args, **kwargs)
        if slots is None:
            return None
        return self._mutants.apply("host-alloc", {"slots": slots}).get("slots", slots)

    def _values(self, pool: Any, host: Any, device: Any, *, packed: bool = False) -> Values:
        """draft: whether a draft's rows are meant; those that are packed with the target's are stored with them."""
        return {"host": host, "device": device, "draft": torch.tensor(packed or pool is not self._target)}
