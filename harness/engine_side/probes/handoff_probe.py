"""What a decode side is handed: one PREBUILT batch each time SGLang builds a draft input from metadata.

Engine side: standard library, NumPy, torch and SGLang only. It must not change any value SGLang computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .names import PREFIX_LENS, first_of
from .probe import Probe
from .recorder import ints, plain_rid
from .snapshot import copied

#: The token that the prefill side chose last: its name changed in 0.5.12.
BONUS = ("bonus_tokens", "verified_id")


class HandoffProbe:
    """Wraps the one place where a prebuilt batch becomes a draft input."""

    def __init__(self, probe: Probe, scheduler: Any) -> None:
        self._probe = probe
        self._target_ids = _target_ids(scheduler)

    def install(self) -> None:
        batches = sys.modules["sglang.srt.managers.schedule_batch"]
        self._probe.ledger.wrap(batches, "ScheduleBatch.process_prebuilt", self._prebuilt)

    def _prebuilt(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._probe.recorder

        def process_prebuilt(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active:
                return original(batch, *args, **kwargs)
            lengths = batch.seq_lens.tolist()
            prefixes = [int(length) for length in first_of(batch, PREFIX_LENS)]
            recorder.open_round(
                mode="PREBUILT",
                rids=[plain_rid(req.rid) for req in batch.reqs],
                starts=lengths,
                lens=[0] * len(lengths),
                final=[True] * len(lengths),
            )
            recorder.last = {"phase": "PREBUILT", "step": 0, "round": recorder.round.index if recorder.round else -1}
            try:
                result = original(batch, *args, **kwargs)
                if batch.reqs and batch.spec_info is None:
                    recorder.note("unbuilt")
                elif batch.reqs:
                    self._tell(batch, lengths, prefixes)
                return result
            finally:
                recorder.close_round()

        return process_prebuilt

    def _tell(self, batch: Any, lengths: list[int], prefixes: list[int]) -> None:
        """The slots whose KV arrived, and what the first draft step will be fed."""
        recorder, given, pool = self._probe.recorder, batch.spec_info, batch.req_to_token_pool.req_to_token
        texts, slots = [], []
        for i, length in enumerate(lengths):
            req = batch.reqs[i]
            texts.append([*req.origin_input_ids, *req.output_ids][1:length])
            slots.append(pool[int(batch.req_pool_indices[i]), :length])
        if self._target_ids is not None:
            recorder.map_ids(self._target_ids)
        layered = self._probe.release.layered
        tensors = {
            "bonus": first_of(given, BONUS),
            "slots": torch.cat(slots),
            "ids": given.topk_index,
            "probs": given.topk_p,
            # Layers read the target's states from the verify on; what is handed over, nobody reads.
            **({} if layered else {"hidden": given.hidden_states}),
        }
        mapped = self._target_ids is not None
        recorder.note("handed", copied(tensors), texts=texts, prefixes=prefixes, mapped=mapped, layered=layered)


def _target_ids(scheduler: Any) -> np.ndarray | None:
    """Target id of each draft id, int64 [V'], from whichever worker holds the map; None: they are the same."""
    worker = scheduler.draft_worker
    for owner in (worker, getattr(worker, "draft_worker", None)):
        ids = getattr(owner, "hot_token_id", None)
        if ids is not None:
            return ints(ids)
    return None


def widths(scheduler: Any) -> dict[str, int]:
    """Width of a hidden row in the metadata buffers; the draft's own relay must be as wide."""
    buffers = getattr(scheduler, "disagg_metadata_buffers", None)
    hidden = getattr(buffers, "output_hidden_states", None)
    return {"metadata_width": -1 if hidden is None else int(hidden.shape[-1])}
