"""What a hierarchical cache copies between the device's KV pools and the host's: which rows, and for which request.

SGLang's cache controller copies on streams of its own, between batches: what it was asked for is read off its queues as
it begins. Slots have one number in the target's pool and in all of the draft's, on the device as on the host. What is
copied of other pools beside these, of sliding windows or recurrent states, is not recorded.

Engine side: torch and SGLang only. It must not change which rows are copied, where to or when. Reading slot numbers
waits for the device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..hooks import HookRegistry, Original, around
from .cached_rows import CachedRows
from .recorder import Recorder, plain_rid
from .storage_probe import StorageProbe, wrap_method

#: Method of the controller that begins copying -> the queue of what is to be copied, and what that does.
COPIES = {"start_writing": ("write_queue", "stored"), "start_loading": ("load_queue", "loaded")}


class HostProbe:
    """Watches the cache controller of one scheduler process; `rows`: the bits of cached rows, where they are known."""

    def __init__(self, recorder: Recorder, controller: Any, tree: Any, rows: CachedRows | None) -> None:
        self._recorder, self._controller, self._tree, self._rows = recorder, controller, tree, rows
        #: whom an operation in the queue loads for
        self._loads_for: dict[int, str] = {}
        self._storage: StorageProbe | None = None

    def install(self, hooks: HookRegistry) -> None:
        """Wrap the controller, and where its prefix cache loads for a request."""
        for method, (queue, what) in COPIES.items():
            wrap_method(hooks, self._controller, method, around(partial(self._begins, queue, what)))
        wrap_method(hooks, self._tree, "init_load_back", around(self._loads))
        if getattr(self._controller, "enable_storage", False):
            self._storage = StorageProbe(self._recorder, self._controller, self._tree, self._rows)
            self._storage.install(hooks)

    def settle(self) -> None:
        """Wait until everything that was begun is done, copies too; before each step."""
        torch.get_device_module().synchronize()
        if self._storage is not None:
            self._storage.settle()

    def rest(self) -> None:
        """Let the prefix cache see what is done beside the loop, as a step would, before it is flushed."""
        self._tree.check_hicache_events()

    def forget(self) -> None:
        """Zero every row on the host: none is in use, and rows of an earlier text would hide that a copy left some out.

        SGLang gives slots back and leaves their rows. 0.5.17 keeps its pools apart, later releases as entries of one.
        """
        whole = self._controller.mem_pool_host
        pools = [one.host_pool for one in getattr(whole, "entries", ())] or [whole]
        for pool in (*pools, getattr(self._controller, "mem_pool_host_draft", None)):
            buffers = getattr(pool, "kv_buffer", ())
            for buffer in (buffers,) if isinstance(buffers, torch.Tensor) else buffers:
                buffer.zero_()
        if self._storage is not None:
            self._storage.forget()

    def _loads(self, original: Original, tree: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(self._controller.load_queue)
        result = original(tree, params, *args, **kwargs)
        for operation in self._controller.load_queue[before:]:
            self._loads_for[id(operation)] = "" if params.req is None else plain_rid(params.req.rid)
        return result

    def _begins(self, queue: str, what: str, original: Original, controller: Any, *args: Any, **kwargs: Any) -> Any:
        found = [(one, self._loads_for.pop(id(one), "")) for one in getattr(controller, queue)]
        result = original(controller, *args, **kwargs)
        for operation, rid in found if self._recorder.active else ():
            self._copied(operation, what, rid)
        return result

    def _copied(self, operation: Any, what: str, rid: str) -> None:
        host, device = operation.host_indices.cpu().long(), operation.device_indices.cpu().long()
        if self._rows is not None:
            ways = ("device", device, "host", host) if what == "stored" else ("host", host, "device", device)
            self._rows.copied(*ways)
        beside = getattr(operation, "pool_transfers", None) or ()
        windows = [one.device_indices for one in beside if one.name == "swa" and one.device_indices is not None]
        message = {"ev": "host", "what": what, "rid": rid, "host": host.tolist(), "device": device.tolist()}
        self._recorder.put_before({**message, "windows": sum(map(len, windows))})
