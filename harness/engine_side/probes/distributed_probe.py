"""What only several processes show: states and token counts of DP ranks, and what a decode engine is handed.

Engine side: standard library, NumPy, torch and SGLang only. Wraps outside of `Probe`. It must not change any value
SGLang computes.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from ..hooks import Original, around
from .names import PREFIX_LENS, first_of
from .probe import Probe
from .recorder import ints, plain_rid
from .snapshot import copied

#: The token that the prefill side chose last: its name changed in 0.5.12.
BONUS = ("bonus_tokens", "verified_id")


class DpProbe:
    """One `state` message a model forward, with or without requests."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def install(self) -> None:
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
        self._probe.hooks.wrap(runner, "ModelRunner.forward", self._forward)

    def _forward(self, original: Original) -> Original:
        recorder = self._probe.recorder

        def forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.round is not None:
                phase = self._probe.forwards.phase_of(is_draft=runner.is_draft_worker)
                state = state_of(forward_batch) if runner.is_draft_worker else {"width": -1, "dtype": ""}
                message = {
                    "ev": "state",
                    "round": recorder.round.index,
                    "phase": phase,
                    "step": recorder.step if phase == "DRAFT" else 0,
                    "idle": not recorder.round.rids,
                    "rows": int(forward_batch.input_ids.shape[0]),
                    "announced": announced(forward_batch),
                    **state,
                }
                recorder.put(message)
                result = original(runner, forward_batch, *args, **kwargs)
                mode = getattr(forward_batch, "dp_padding_mode", None)  # decided on the way
                message["padding"] = "" if mode is None else str(mode.name)
                return result
            return original(runner, forward_batch, *args, **kwargs)

        return forward


def state_of(forward_batch: Any) -> dict[str, Any]:
    """Width and dtype of the draft state that goes in; -1 where there is none."""
    hidden = getattr(forward_batch.spec_info, "hidden_states", None)
    if not isinstance(hidden, torch.Tensor):
        return {"width": -1, "dtype": ""}
    return {
        "width": int(hidden.shape[-1]),
        "held": int(hidden.shape[0]),
        "dtype": str(hidden.dtype).removeprefix("torch."),
    }


def announced(forward_batch: Any) -> list[int]:
    """Tokens that each rank is said to bring, before SGLang pads them; empty where nothing is said."""
    counts = getattr(forward_batch, "global_num_tokens_cpu", None)
    return [] if counts is None else [int(count) for count in counts]


class HandoffProbe:
    """One PREBUILT batch each time SGLang builds a draft input from metadata."""

    def __init__(self, probe: Probe, scheduler: Any) -> None:
        self._probe = probe
        self._target_ids = _target_ids(scheduler)

    def install(self) -> None:
        batches = sys.modules["sglang.srt.managers.schedule_batch"]
        self._probe.hooks.wrap(batches, "ScheduleBatch.process_prebuilt", around(self._prebuilt))

    def _prebuilt(self, original: Original, batch: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._probe.recorder
        if not recorder.active:
            return original(batch, *args, **kwargs)
        lengths = batch.seq_lens.tolist()
        prefixes = [int(length) for length in first_of(batch, PREFIX_LENS)]
        recorder.open_round(mode="PREBUILT", rids=[plain_rid(req.rid) for req in batch.reqs], starts=lengths)
        recorder.last = {"phase": "PREBUILT", "step": 0, "round": recorder.round.index if recorder.round else -1}
        try:
            result = original(batch, *args, **kwargs)
            if batch.reqs and batch.spec_info is None:
                recorder.note("unbuilt")
            elif batch.reqs:
                self._note(batch, lengths, prefixes)
            return result
        finally:
            recorder.close_round()

    def _note(self, batch: Any, lengths: list[int], prefixes: list[int]) -> None:
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
