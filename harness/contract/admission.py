"""Which requests SGLang takes: what it says of lengths and of its queue, by its own words and names.

This module must not judge, and must not import torch, sglang or any other room.
"""

from __future__ import annotations

from harness.contract.requests import RequestSpec
from harness.contract.settings import EngineConfig, SpecConfig

#: Parts of what SGLang answers to a request that it does not take for its length, for its queue's, or for a priority,
#: which no scenario has where none counts.
REFUSALS = ("context length", "maximum allowed length", "queue is full", "priority is disabled")
#: And to one that it gives up, alone in a pool that is too small for it.
EXHAUSTED = "Out of memory even after retracting"
#: And to one that is aborted, for whatever reason: SGLang gives none.
ABORTED = "Aborted"
#: And where one side of a pair of engines gives it up between them.
LOST_ON_THE_WAY = "transfer failed for request"
#: A prompt that leaves fewer tokens of the context, or of the pool, is refused by the scheduler.
LEAST_ROOM = 6


def reserved(spec: SpecConfig) -> int:
    """Tokens of the context that SGLang's front door keeps for what a round drafts."""
    return max(spec.num_steps * spec.eagle_topk, spec.num_draft_tokens, spec.most_steps + 1)


def reserved_slots(spec: SpecConfig) -> int:
    """KV slots beyond its committed tokens that a request holds while it decodes (pages of one): two rounds of them."""
    return 2 * max(spec.most_steps * spec.eagle_topk, spec.num_draft_tokens, spec.most_steps + 1)


def longest_prompt(spec: SpecConfig, engine: EngineConfig) -> int:
    """Prompt tokens at most: they leave room to speculate in the context, and some of the context and of the pool."""
    pool = engine.max_total_tokens // engine.page_size * engine.page_size
    return min(engine.context_length - reserved(spec), min(engine.context_length, pool) - LEAST_ROOM) - 1


def longest(spec: SpecConfig, engine: EngineConfig) -> int:
    """Tokens of a prompt and its answer together at most, by the context."""
    return engine.context_length - reserved(spec)


def too_long(request: RequestSpec, spec: SpecConfig, engine: EngineConfig) -> str:
    """Why SGLang refuses a request for its length, empty if it takes it."""
    prompt, new = len(request.input_ids), request.max_new_tokens
    if prompt > (most := longest_prompt(spec, engine)):
        return f"{prompt} prompt tokens, of which SGLang takes {most} at most"
    if not request.unlimited and prompt + new > longest(spec, engine):
        return (
            f"{prompt} prompt tokens and {new} new ones exceed the context of {engine.context_length} "
            f"less {reserved(spec)} to speculate"
        )
    return ""
