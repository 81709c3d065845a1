"""Not a matter of the CPU: what SGLang does wrong on any device, mended where a run assumes it.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from .patches import Note, register


def _of_a_copy(forward: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward that may change the fields of its batch, of nobody else's."""
    return forward(replace(batch), *args, **kwargs)


@register
def idle_metadata(module: ModuleType, argument: str, note: Note) -> None:
    """Not a matter of the CPU: SGLang's own code fails on an idle batch. Only where a run assumes that it does."""
    original = module.TritonAttnBackend.init_forward_metadata

    def init_forward_metadata(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        spec_info = forward_batch.spec_info
        if not forward_batch.forward_mode.is_idle() or getattr(spec_info, "kv_indptr", None) is not None:
            return original(self, forward_batch, *args, **kwargs)
        forward_batch.spec_info = None
        try:
            return original(self, forward_batch, *args, **kwargs)
        finally:
            forward_batch.spec_info = spec_info

    module.TritonAttnBackend.init_forward_metadata = init_forward_metadata
    what = f"{module.__name__}.TritonAttnBackend.init_forward_metadata (idle batch)"
    note(what, "stand-in", "idle", "assumed F-007: an idle rank dies here")


@register
def unplanned(module: ModuleType, argument: str, note: Note) -> None:
    """Not a matter of the CPU: a batch is marked as planned for, and nobody has. Only where a run assumes that."""
    setattr(module.ForwardBatch, argument, lambda *_a, **_k: None)  # so that each forward asks SGLang to plan
    what = f"{module.__name__}.ForwardBatch.{argument}"
    note(what, "stand-in", "plan", "assumed F-011: eager MTP forwards run with an earlier one's metadata")


@register
def layer_batches(module: ModuleType, argument: str, note: Note) -> None:
    """Not a matter of the CPU: MTP layers share a batch, which each pads. Only where a run assumes that they do."""
    prepare, worker = module.prepare_for_draft_extend, getattr(module, argument)
    original = worker._draft_extend_for_decode

    def of_every_row(draft_input: Any, *args: Any, **kwargs: Any) -> Any:
        draft_input.num_tokens_for_logprob_per_req = draft_input.num_tokens_per_req
        return prepare(draft_input, *args, **kwargs)

    def draft_extend(self: Any, *args: Any, **kwargs: Any) -> Any:
        for runner in self.draft_runner_list:
            runner.forward = functools.partial(_of_a_copy, runner.forward)
        try:
            return original(self, *args, **kwargs)
        finally:
            for runner in self.draft_runner_list:
                del runner.forward

    module.prepare_for_draft_extend, worker._draft_extend_for_decode = of_every_row, draft_extend  # type: ignore[attr-defined]
    what = f"{module.__name__}.{argument}._draft_extend_for_decode"
    note(what, "stand-in", "plan", "assumed F-091: MTP layers share a batch that each pads")
