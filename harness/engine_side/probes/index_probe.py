"""Which rows each layer's sparse indexer chose, call by call, of an engine that runs alone (`benchmarks.indexer`).

One JSON line a call: {"queries", "mode", "tokens", "positions", "left", "wrong"}. queries: the sum of the layer's query
weights, by which whoever has the checkpoint knows the layer. left: of each row the positions up to its own that were
not chosen. wrong: how many of its places are no position that it sees, or one that it has twice. Both are empty where
it was not asked to choose, as for the first rows of a prompt, which see fewer than it takes. Waits for the device at
each call; inside a CUDA graph no Python runs, and nothing is recorded.

Engine side: torch only. It must not change any value SGLang computes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..hooks import HookRegistry, ImportHooks, Original, around

MODULE = "sglang.srt.layers.attention.dsa.dsa_indexer"
POOL = "sglang.srt.mem_cache.memory_pool"
#: SGLang's own switch; off, what is chosen are positions, else the slots that hold them.
FUSED = "SGLANG_DSA_FUSE_TOPK"


class IndexProbe:
    """Of one process; writes to a file of its own in `folder`."""

    def __init__(self, hooks: ImportHooks, folder: Path) -> None:
        self._file, self._registry = folder / f"chosen-{os.getpid()}.jsonl", HookRegistry()
        self._table: Any = None
        self._named: dict[int, float] = {}
        hooks.after(POOL, self._keep_table)
        hooks.after(MODULE, self._watch)

    def _watch(self, module: ModuleType) -> None:
        self._registry.wrap(module, "Indexer.forward_cuda", around(self._chooses))

    def _keep_table(self, module: ModuleType) -> None:
        """The table of slots by request and position, which target and draft share."""

        def init(original: Original, pool: Any, *args: Any, **kwargs: Any) -> None:
            original(pool, *args, **kwargs)
            self._table = pool.req_to_token

        self._registry.wrap(module, "ReqToTokenPool.__init__", around(init))

    def _chooses(
        self,
        original: Original,
        indexer: Any,
        x: Any,
        q_lora: Any,
        positions: Any,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = original(indexer, x, q_lora, positions, forward_batch, *args, **kwargs)
        if not torch.cuda.is_current_stream_capturing():
            self._note(indexer, positions, forward_batch, found)
        return found

    def _note(self, indexer: Any, positions: torch.Tensor, batch: Any, found: torch.Tensor | None) -> None:
        if id(indexer) not in self._named:
            self._named[id(indexer)] = float(indexer.wq_b.weight.double().sum())
        places, left, wrong = positions.tolist(), list[list[int]](), list[int]()
        for request, rows in () if found is None or not len(found) else _shares(batch, len(places)):
            slots = self._table[request, : max(places[rows]) + 1].long() if places[rows] else None
            assert found is not None
            for place, row in zip(places[rows], found[rows].long(), strict=True):
                kept = torch.zeros(place + 1, dtype=torch.long, device=row.device)
                row = row[row >= 0]
                if os.environ.get(FUSED, "1").lower() in ("1", "true"):
                    assert slots is not None
                    at = (row[:, None] == slots[None, : place + 1]).int()
                    row = torch.where(at.any(dim=1), at.argmax(dim=1), place + 1)
                kept.scatter_add_(0, row[row <= place], torch.ones_like(row[row <= place]))
                left.append((kept == 0).nonzero()[:, 0].tolist())
                wrong.append(int((row > place).sum() + (kept > 1).sum()))
        said = {
            "queries": self._named[id(indexer)],
            "mode": batch.forward_mode.name,
            "tokens": batch.input_ids.tolist(),
            "positions": places,
            "left": left,
            "wrong": wrong,
        }
        with self._file.open("a") as file:
            file.write(json.dumps(said) + "\n")


def _shares(batch: Any, count: int) -> Iterator[tuple[int, slice]]:
    """Each request's place in the table and its rows of a forward; a verify, and what catches up with it, has as many
    of each."""
    requests = batch.req_pool_indices.tolist()
    prompt = batch.forward_mode.is_extend_without_speculative()
    counts = list(batch.extend_seq_lens_cpu) if prompt else [count // max(1, len(requests))] * len(requests)
    start = 0
    for request, own in zip(requests, counts, strict=True):
        yield request, slice(start, start + int(own))
        start += int(own)
