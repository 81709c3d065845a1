"""Which requests SGLang takes: what it says of lengths and of its queue, by its own words and names.

This module must not judge, and must not import torch, sglang or any other room.
"""

from __future__ import annotations

from harness.contract.requests import RequestSpec
from harness.contract.scenario import EngineConfig, SpecConfig

#: Parts of what SGLang answers to a request that it does not take for its length, or for its queue's.
REFUSALS = ("context length", "maximum allowed length", "queue is full")
#: And to one that it gives up, alone in a pool that is too small for it.
EXHAUSTED = "Out of memory even after retracting"
#: A prompt that leaves fewer tokens of the context, or of the pool, is refused by the scheduler.
LEAST_ROOM = 6


def reserved(spec: SpecConfig) -> int:
    """Tokens of the context that SGLang's front door keeps for what a round drafts."""
    return max(spec.num_steps * spec.eagle_topk, spec.num_draft_tokens, spec.most_steps + 1)


def reserved_slots(spec: SpecConfig) -> int:
    """KV slots beyond its committed tokens that a request holds while it decodes (pages of one): two rounds of them."""
    return 2 * max(spec.most_steps * spec.eagle_topk, spec.num_draft_tokens, spec.most_steps + 1)


def too_long(request: RequestSpec, spec: SpecConfig, engine: EngineConfig) -> str:
    """Why SGLang refuses a request for its length, empty if it takes it."""
    prompt, new, spare = len(request.input_ids), request.max_new_tokens, reserved(spec)
    pool = engine.max_total_tokens // engine.page_size * engine.page_size
    most = min(engine.context_length, pool) - LEAST_ROOM
    if prompt + spare >= engine.context_length:
        return f"{prompt} prompt tokens and {spare} to speculate fill the context of {engine.context_length}"
    if prompt >= most:
        return f"{prompt} prompt tokens, of which the scheduler takes fewer than {most}"
    if not request.unlimited and prompt + new + spare > engine.context_length:
        return (
            f"{prompt} prompt tokens and {new} new ones exceed the context of {engine.context_length} "
            f"less {spare} to speculate"
        )
    return ""
