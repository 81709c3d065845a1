"""Where mutants of sliding windows act: what attention is told to read, and what is given back of their pool.

Engine side: standard library, torch and SGLang only. It must leave everything as it is where no mutant acts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .armed import ArmedMutants, one_each
from .registry import Share, around

Original = Callable[..., Any]
ATTENTION = "sglang.srt.layers.attention.triton_backend"
#: What gives slots back while their request runs, newest release first.
FREES = ("free_swa_segment", "free_swa")


class WindowSites:
    """The wrappers of one scheduler process whose pool for sliding windows is its own."""

    def __init__(self, mutants: ArmedMutants) -> None:
        self._mutants = mutants
        self._evicting = False

    def install(self, scheduler: Any) -> list[str]:
        """Wrap every site; returns those this release does not have."""
        hooks = self._mutants.probe.hooks
        pool = type(scheduler.token_to_kv_pool_allocator)
        pools, known = sys.modules[pool.__module__], len(hooks.missing)
        batch = sys.modules["sglang.srt.managers.schedule_batch"]
        free = next(name for name in FREES if hasattr(pool, name))
        hooks.wrap(sys.modules[ATTENTION], "update_sliding_window_buffer", around(self._reads), innermost=True)
        hooks.wrap(batch, "ScheduleBatch._evict_swa", around(self._evict), innermost=True)
        hooks.wrap(pools, f"{pool.__name__}.{free}", around(self._free), innermost=True)
        return hooks.missing[known:]

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
