"""Where mutants of a hierarchical cache act: what is copied to and from the host and storage, and the host's slots.

Engine side: standard library, torch and SGLang only. It must leave everything as it is where no mutant acts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .armed import ArmedMutants
from .registry import Values, around

Original = Callable[..., Any]
POOLS = "sglang.srt.mem_cache.pool_host"
#: Module -> class whose rows are copied.
KINDS = {f"{POOLS}.mha": "MHATokenToKVPoolHost", f"{POOLS}.mla": "MLATokenToKVPoolHost"}


class HostSites:
    """The wrappers of one scheduler process with a hierarchical cache."""

    def __init__(self, mutants: ArmedMutants, controller: Any) -> None:
        self._mutants, self._target = mutants, controller.mem_pool_device
        whole = controller.mem_pool_host  # in newer releases a group, of which the target's pool is one
        self._targets_rows = getattr(getattr(whole, "anchor_entry", None), "host_pool", whole)

    def install(self) -> list[str]:
        """Wrap every site; returns those this release does not have."""
        hooks = self._mutants.probe.hooks
        known = len(hooks.missing)
        for name, kind in KINDS.items():
            hooks.wrap(sys.modules[name], f"{kind}.backup_from_device_all_layer", around(self._store), innermost=True)
            hooks.wrap(sys.modules[name], f"{kind}.load_to_device_per_layer", around(self._load), innermost=True)
            hooks.wrap(sys.modules[name], f"{kind}.get_data_page", around(self._write), innermost=True)
            hooks.wrap(sys.modules[name], f"{kind}.set_from_flat_data_page", around(self._read), innermost=True)
        hooks.wrap(sys.modules[f"{POOLS}.base"], "HostKVCache.alloc", around(self._alloc), innermost=True)
        return hooks.missing[known:]

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
