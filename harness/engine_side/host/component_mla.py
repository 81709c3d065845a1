"""Asks the release's own code how wide flashinfer's MLA draft backend makes its index buffer: component level, #27460.

Engine side: `component_handoff` starts it inside SGLang's environment; standard library, torch and SGLang only.
The constructor of that backend refuses more than one candidate a step, so the buffer's other widths are asked of an
object that was never constructed. It must not wrap anything of the code it asks about; only memory is named otherwise
("cuda" is the CPU here).
"""

from __future__ import annotations

import importlib
import types
from functools import partial
from typing import Any

from .component_handoff import answered

BACKEND = "sglang.srt.layers.attention.flashinfer_mla_backend"
CLASS = "FlashInferMLAMultiStepDraftBackend"
PULL_REQUEST = 27460
#: Two requests in the largest captured batch, three steps, 64 tokens of context: what decides the width.
REQUESTS, STEPS, CONTEXT = 2, 3, 64
#: What a request's row of the token table can hold behind its context; any width serves that holds the steps' slots.
SPARE = 64
UNWRITTEN = -1


class _OnCpu:
    """The torch module as the backend's module sees it, for which "cuda" is the CPU. Nothing else differs."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *args: Any, **kwargs: Any) -> Any:
        return self._torch.zeros(*args, **(kwargs | {"device": "cpu"}))


def _construct(module: Any, topk: int) -> dict[str, Any]:
    """The constructor alone; a runner that knows nothing serves, since what is asked comes before it is looked at."""
    getattr(module, CLASS)(types.SimpleNamespace(), topk, STEPS)
    return {"outcome": "built", "what": CLASS}


def _row(module: Any, torch: Any, topk: int) -> Any:
    """int32 [steps, width]: the buffer that the release's `init_cuda_graph_state` makes."""
    backend = object.__new__(getattr(module, CLASS))
    backend.topk, backend.speculative_num_steps, backend.max_context_len = topk, STEPS, CONTEXT
    backend.attn_backends = [
        types.SimpleNamespace(init_cuda_graph_state=lambda *_a, **_k: None) for _ in range(STEPS - 1)
    ]
    module.torch = _OnCpu(torch)
    try:
        backend.init_cuda_graph_state(REQUESTS, REQUESTS * topk)
    finally:
        module.torch = torch
    return backend.cuda_graph_kv_indices


def _written(module: Any, torch: Any, topk: int) -> int:
    """How many indices of one step the release's own kernel writes for a full batch, given all the room it wants."""
    room = REQUESTS * topk * (CONTEXT + STEPS)
    buffer = torch.full((STEPS, room), UNWRITTEN, dtype=torch.int32)
    length = CONTEXT - STEPS  # the longest a request can be with its steps still inside the context
    lengths = torch.full((REQUESTS,), length, dtype=torch.int64)
    table = torch.arange(REQUESTS * (CONTEXT + SPARE), dtype=torch.int32).view(REQUESTS, -1)
    offsets = torch.zeros(STEPS, REQUESTS * topk + 1, dtype=torch.int32)
    module.generate_draft_decode_kv_indices[(STEPS, REQUESTS, topk)](
        torch.arange(REQUESTS, dtype=torch.int64),
        table,
        lengths,
        buffer,
        offsets,
        lengths.repeat_interleave(topk),
        table.shape[1],
        room,
        offsets.shape[1],
        module.next_power_of_2(REQUESTS),
        module.next_power_of_2(STEPS),
        module.next_power_of_2(REQUESTS * topk),
        1,
    )
    return int((buffer != UNWRITTEN).sum(dim=1).max())


def _fits(module: Any, torch: Any, topk: int) -> dict[str, Any]:
    width = int(_row(module, torch, topk).shape[1])
    written = _written(module, torch, topk)
    relation = "fits" if written <= width else "overflows"
    return {"outcome": f"{relation}: {written} of {width}", "written": written, "width": width}


def _switched(module: Any, torch: Any, topk: int) -> dict[str, Any]:
    """The same with SGLang's own revert switch applied first; it changes this process, so it is asked last."""
    try:
        toggle: Any = importlib.import_module("sglang.srt.debug_utils.pr_fix_toggle")
    except ImportError:
        return {"outcome": "no such switch"}
    toggle._revert_pr_fix(PULL_REQUEST)
    return _fits(module, torch, topk)


def _kernel(module: Any) -> None:
    """Older releases import the kernel inside the constructor that is not run here."""
    if not hasattr(module, "generate_draft_decode_kv_indices"):
        utils: Any = importlib.import_module("sglang.srt.speculative.spec_utils")
        module.generate_draft_decode_kv_indices = utils.generate_draft_decode_kv_indices


def answers(torch: Any) -> dict[str, dict[str, Any]]:
    """Case -> what the release's code did; the process is of no further use, since the switch changed it."""
    module: Any = importlib.import_module(BACKEND)
    _kernel(module)
    asked = {"constructed, topk 2": answered(lambda: _construct(module, 2))}
    for topk in (1, 2, 4):
        asked[f"buffer, topk {topk}"] = answered(partial(_fits, module, torch, topk))
    asked["buffer, topk 2, fix taken out by switch"] = answered(partial(_switched, module, torch, 2))
    return asked
