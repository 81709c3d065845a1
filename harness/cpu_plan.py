"""Lets the multi-layer MTP worker plan attention metadata before every eager forward, where a run assumes F-011.

Engine side: standard library only. Up to 0.5.15 that worker tells an eager forward to plan nothing, though nobody has
planned for it. Here each forward plans for itself, by SGLang's own code; nothing here may compute what is planned.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def never_marked(module: types.ModuleType) -> str:
    """From 0.5.13 on a batch is marked as planned: make the mark do nothing. Returns the name of what was replaced."""

    def mark_forward_metadata_ready(self: Any, *_args: Any, **_kwargs: Any) -> None:
        return None

    module.ForwardBatch.mark_forward_metadata_ready = mark_forward_metadata_ready
    return "ForwardBatch.mark_forward_metadata_ready"


def never_skipped(module: types.ModuleType) -> str:
    """Before, each call says whether to plan: always. Returns the name of what was replaced."""
    original = module.ModelRunner.forward

    def forward(self: Any, forward_batch: Any, skip_attn_backend_init: bool = False, *args: Any, **kwargs: Any) -> Any:
        return original(self, forward_batch, False, *args, **kwargs)

    module.ModelRunner.forward = forward
    return "ModelRunner.forward"


#: By the argument of a row of the compatibility table.
WAYS: dict[str, Callable[[types.ModuleType], str]] = {"marked": never_marked, "skipped": never_skipped}
