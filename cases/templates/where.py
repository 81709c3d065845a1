"""What a boot configuration has, for templates to say where they fit."""

from __future__ import annotations

from collections.abc import Callable

from cases.boots import Boot
from cases.builder import CONTEXT
from harness.contract.admission import reserved_slots

#: What a boot configuration has, by a word.
HAS: dict[str, Callable[[Boot], bool]] = {
    "cache": lambda boot: boot.engine.radix_cache,
    "pages": lambda boot: boot.engine.page_size > 1,
    "windows": lambda boot: not boot.engine.disable_hybrid_swa_memory,
    "states": lambda boot: boot.checkpoint.startswith("hybrid"),
    "host": lambda boot: bool(boot.engine.server_args.get("enable_hierarchical_cache")),
    # a template's two or three requests surely fit the pool together
    "room": lambda boot: boot.engine.max_total_tokens >= 512,
    "a context's room": lambda boot: boot.engine.max_total_tokens > CONTEXT,
    # a request that SGLang cuts to the pool, less a page or so, has no room for its last round: two are reserved, of
    # which it may fill one
    "an end": lambda boot: reserved_slots(boot.spec) - (boot.spec.most_steps + 1) > boot.engine.page_size + 1,
    "ranks": lambda boot: boot.engine.dp_size > 1,
    "coordination": lambda boot: boot.engine.dp_spec_prefill_coordination,
    "priorities": lambda boot: boot.engine.priority_scheduling,
    "queue": lambda boot: boot.engine.max_queued_requests is not None,
    "mixed chunks": lambda boot: boot.engine.enable_mixed_chunk,
    "changing steps": lambda boot: boot.spec.adaptive is not None,
    "chains": lambda boot: boot.spec.eagle_topk == 1,
    "adapters": lambda boot: len(boot.engine.lora_paths) > 0,
    "new weights": lambda boot: bool(boot.successor),
}


def on(*words: str) -> Callable[[Boot], bool]:
    """Whether a boot configuration has all of these, or has not what "no" stands before.

    One engine; a pair of them is in `handoff`.
    """
    wanted = [(HAS[word.removeprefix("no ")], not word.startswith("no ")) for word in words]
    return lambda boot: not boot.engine.disaggregation and all(has(boot) == due for has, due in wanted)
