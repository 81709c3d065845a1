"""The fixed scenarios of sliding windows that have a KV pool of their own: what leaves a window is given back.

Prompts, chunks and what is generated are longer than the windows of the pairs, which is what these are about. Pure
data; it must not know which bugs exist.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.fixed import DRAIN, request, shapes, steps, submit, tokens
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario

#: New tokens after which some have left every window, however many a verify accepts.
LONG = 40


def window_shapes(boot: Boot) -> list[Scenario]:
    """Requests of which more is known than a window reaches: alone in chunks, together, and from a cached prefix."""
    prefix = f"{boot.name}-"
    program = boot.program(prefix)
    every = [
        program(
            "outlived",
            [request("a", 50, seed=401, new=LONG)],
            [submit("a"), DRAIN],
            wants=["non_final_chunk", "window_evicted"],
            chunk=16,
        ),
        program(
            "together",
            [request(rid, 5 + 14 * i, seed=410 + i, new=LONG - 9 * i) for i, rid in enumerate("abc")],
            [submit("a", "b"), steps(3), submit("c"), DRAIN],
            wants=["window_evicted", "batch_grows", "batch_shrinks"],
            chunk=32,
        ),
    ]
    if not boot.engine.radix_cache:
        (chunked,) = shapes(
            **boot.given,
            prefix=prefix,
            only=("chunked-long-prompt",),
        )
        return [*every, chunked.model_copy(update={"wants": (*chunked.wants, "window_evicted_in_prompt")})]
    shared = tokens(seed=420, length=40)
    requests = [
        RequestSpec(rid="a", input_ids=shared, max_new_tokens=LONG),
        RequestSpec(rid="b", input_ids=shared[:32] + tokens(seed=421, length=9), max_new_tokens=24),
        RequestSpec(rid="c", input_ids=shared + tokens(seed=422, length=3), max_new_tokens=12),
    ]
    script = [submit("a"), steps(6), submit("b"), steps(40), submit("c"), DRAIN]
    wants = ["prefix_hit", "prefix_hit_past_window", "window_evicted"]
    return [*every, program("shared-prefix", requests, script, wants=wants)]
