"""Hooks on the attention backend: which KV slots each forward reads, by the arguments that its kernels are given.

A CPU and a card run through the same two calls, `decode_attention_fwd` and `extend_attention_fwd` of the Triton
backend: whichever kernel computes, it is given the same slots. What is looked at is the first layer of a forward that
attends everything; layers with a sliding window address a pool of their own. Other backends, other kernels and the
inside of a CUDA graph, where no Python runs, are not recorded, and the trace then says so.

Engine side: standard library, torch and SGLang only. It must not change an argument or a result.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..hooks import HookRegistry, Original
from .cached_rows import CachedRows
from .recorder import Recorder
from .snapshot import Copy, Tensors

BACKEND = "sglang.srt.layers.attention.triton_backend"
#: Method of the backend -> the kernel that it calls by.
KERNELS = {"forward_decode": "decode_attention_fwd", "forward_extend": "extend_attention_fwd"}
#: Plans of more slots than this stay on a card: how much of one is used, nobody there knows without waiting for it.
MOST_ON_A_CARD = 1 << 16


class AttentionProbe:
    """Between `begins` and `ends` of a forward, what its first layer reads."""

    def __init__(self, recorder: Recorder, hooks: HookRegistry, *, rows: bool) -> None:
        """rows: whether to see too if cached rows change; only where nobody writes them but forwards on the host."""
        self._recorder, self._hooks = recorder, hooks
        self.rows = CachedRows() if rows else None
        self._scenario = -1
        self._wanted = False
        self._read: Copy | None = None
        self._facts: dict[str, Any] = {}
        self._signatures: dict[str, inspect.Signature] = {}

    def install(self) -> None:
        """Wrap the backend, where this engine has it."""
        if BACKEND in sys.modules:
            for method, kernel in KERNELS.items():
                self._hooks.wrap(sys.modules[BACKEND], f"TritonAttnBackend.{method}", self._watched(kernel))

    def begins(self) -> None:
        self._wanted, self._read, self._facts = True, None, {}

    def ends(self) -> tuple[Copy | None, dict[str, Any]]:
        """What was read, and how a mask is to be understood; nothing where no kernel that is known was called."""
        self._wanted = False
        return self._read, self._facts

    def _watched(self, name: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def forward(
                backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kw: Any
            ) -> Any:
                window = getattr(layer, "sliding_window_size", None)
                if not self._wanted or (window is not None and window > -1):
                    return original(backend, q, k, v, layer, forward_batch, *args, **kw)
                kernel = getattr(backend, name)
                setattr(backend, name, self._noting(name, kernel, forward_batch))
                try:
                    return original(backend, q, k, v, layer, forward_batch, *args, **kw)
                finally:
                    setattr(backend, name, kernel)

            return forward

        return make

    def _noting(self, name: str, kernel: Original, batch: Any) -> Original:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._wanted:
                self._wanted = False
                if name not in self._signatures:
                    self._signatures[name] = inspect.signature(kernel)
                bound = self._signatures[name].bind(*args, **kwargs)
                bound.apply_defaults()
                self._take(bound.arguments, batch)
            return kernel(*args, **kwargs)

        return call

    def _take(self, arguments: Mapping[str, Any], batch: Any) -> None:
        tensors = _plan(arguments)
        if self.rows is not None:
            tensors["read_changed"] = self._changed(self.rows, arguments, batch, tensors["read_slots"])
        if any(
            one is not None and one.device.type != "cpu" and one.numel() > MOST_ON_A_CARD for one in tensors.values()
        ):
            return
        self._read = self._recorder.copied(tensors)
        self._facts = {"causal": bool(arguments.get("is_causal", True))}
        self._facts["prefix_masked"] = not arguments.get("skip_prefix_custom_mask", True)

    def _changed(self, rows: CachedRows, arguments: Mapping[str, Any], batch: Any, read: Any) -> torch.Tensor:
        """bool [w]: which of the slots that are read hold something else than was written."""
        if self._scenario != self._recorder.scenarios:
            self._scenario = self._recorder.scenarios
            rows.forget()
        buffers = arguments["k_buffer"], arguments["v_buffer"]
        written = batch.out_cache_loc.long()
        found = rows.changed(buffers, written, read.long())
        if arguments.get("custom_mask") is not None and getattr(batch.spec_info, "topk", 1) > 1:
            rows.lost(buffers, written)  # accepted nodes of a tree are moved together
        return found


def _plan(arguments: Mapping[str, Any]) -> Tensors:
    """Of s sequences: their cached slots, and of an extend its rows and its mask; without what a buffer has behind."""
    indptr = arguments["kv_indptr"]
    rows, mask = arguments.get("qo_indptr"), arguments.get("custom_mask")
    masks = arguments.get("mask_indptr") if mask is not None else None
    return {
        "read_indptr": indptr,
        "read_slots": _used(arguments["kv_indices"], indptr),
        "read_rows": rows,
        "read_mask": None if mask is None else _used(mask, masks),
        "read_masks": masks,
    }


def _used(buffer: torch.Tensor, indptr: Any) -> torch.Tensor:
    """What is used of a buffer; on a card all of it, since nobody may wait there."""
    if buffer.device.type != "cpu" or not isinstance(indptr, torch.Tensor):
        return buffer
    return buffer[: int(indptr[-1])]
