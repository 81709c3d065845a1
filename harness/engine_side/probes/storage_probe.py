"""Storage behind the host's cache (`hicache_storage_backend`): which pages go there, and which come back.

SGLang's cache controller looks up, reads and writes pages in threads of its own. They are waited for before each step
and before a request is asked whether its pages are there, so that the scenario alone decides in which step that is.

Engine side: torch and SGLang's objects only. It must not change which pages are read or written.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ..hooks import HookRegistry, Make, Original, around
from .cached_rows import CachedRows
from .recorder import Recorder
from .work_queues import WorkQueues

#: The queues from which the controller's threads take their work, each before those that it may lead to.
WORK = ("prefetch_queue", "prefetch_buffer", "prefetch_sync_queue", "backup_queue")
#: How long threads may take for what a step began.
PATIENCE_SECONDS = 60.0


class StorageProbe:
    """Of one scheduler process; pages are numbered as they are first seen, rows of a page one after the other."""

    def __init__(self, recorder: Recorder, controller: Any, tree: Any, rows: CachedRows | None) -> None:
        self._recorder, self._controller, self._tree, self._rows = recorder, controller, tree, rows
        self._pages: dict[str, int] = {}
        #: operations whose pages a thread has read
        self._read: deque[Any] = deque()
        self._work = WorkQueues(controller, WORK)

    def install(self, hooks: HookRegistry) -> None:
        """Wrap where pages are written, read, and asked for."""
        wrap_method(hooks, self._controller, "write_storage", around(self._writes))
        wrap_method(hooks, self._controller, "_page_transfer", around(self._reads))
        wrap_method(hooks, self._tree, "check_prefetch_progress", around(self._asks))

    def settle(self) -> None:
        """Wait until every thread waits for work, then report what they read."""
        until = time.monotonic() + PATIENCE_SECONDS
        while undone := self._work.undone():
            if time.monotonic() > until:
                where = "; ".join(undone)
                raise TimeoutError(f"threads of SGLang's cache controller did not come to rest ({where})")
            time.sleep(0.0002)
        while self._read:
            operation = self._read.popleft()
            self._said("fetched", operation.host_indices, operation.hash_value)

    def forget(self) -> None:
        """Nothing of an earlier scenario is kept."""
        self._read.clear()
        self._tree.clear_storage_backend()

    def _writes(
        self,
        original: Original,
        controller: Any,
        host_indices: Any,
        token_ids: Any,
        hash_value: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._said("kept", host_indices, hash_value)
        return original(controller, host_indices, token_ids, hash_value, *args, **kwargs)

    def _reads(self, original: Original, controller: Any, operation: Any) -> Any:
        if not operation.is_terminated():  # said when the scheduler waits, not in this thread
            self._read.append(operation)
        return original(controller, operation)

    def _asks(self, original: Original, tree: Any, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return original(tree, *args, **kwargs)

    def _said(self, what: str, host: torch.Tensor, hashes: Sequence[str]) -> None:
        """host: int64 [w], the rows of as many whole pages."""
        if not self._recorder.active:
            return
        size = self._controller.page_size
        pages = [self._pages.setdefault(one, len(self._pages)) for one in hashes]
        host = host.cpu().long()[: len(pages) * size]
        storage = (torch.tensor(pages)[:, None] * size + torch.arange(size)).flatten()[: len(host)]
        if self._rows is not None:
            ways = ("host", host, "storage", storage) if what == "kept" else ("storage", storage, "host", host)
            self._rows.copied(*ways)
        message = {"ev": "host", "what": what, "rid": "", "host": host.tolist(), "device": []}
        self._recorder.put_before({**message, "storage": storage.tolist()})


def wrap_method(hooks: HookRegistry, owner: Any, method: str, make: Make) -> None:
    """Wrap a method on the class of `owner` that defines it."""
    defined = next(one for one in type(owner).__mro__ if method in vars(one))
    hooks.wrap(sys.modules[defined.__module__], f"{defined.__name__}.{method}", make)
