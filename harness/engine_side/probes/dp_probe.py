"""What only ranks that run in step can show: the draft state of every forward, and the token counts announced for it.

Engine side: standard library, torch and SGLang only. It must not change any value SGLang computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .probe import Probe


class DpProbe:
    """One `state` message a model forward, with or without requests; wraps outside of `Probe`."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def install(self) -> None:
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
        self._probe.ledger.wrap(runner, "ModelRunner.forward", self._forward)

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._probe.recorder

        def forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.round is not None:
                phase = self._probe.phase_of(runner, forward_batch)
                state = state_of(forward_batch) if runner.is_draft_worker else {"width": -1, "dtype": ""}
                recorder.put(
                    {
                        "ev": "state",
                        "round": recorder.round.index,
                        "phase": phase,
                        "step": recorder.step if phase == "DRAFT" else 0,
                        "idle": not recorder.round.rids,
                        "rows": int(forward_batch.input_ids.shape[0]),
                        "announced": announced(forward_batch),
                        **state,
                    }
                )
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
