"""The fixed scenarios of sliding windows that have a KV pool of their own: what leaves a window is given back.

Prompts, chunks and what is generated are longer than the windows of the pairs, which is what these are about. Pure
data; it must not know which bugs exist.
"""

from __future__ import annotations

from cases.boots import Boot
from cases.fixed import shapes
from harness.contract.scenario import Scenario

#: New tokens after which some have left every window, however many a verify accepts.
LONG = 40


def window_shapes(boot: Boot) -> list[Scenario]:
    """Requests of which more is known than a window reaches: alone in chunks, together, and from a cached prefix."""
    prefix = f"{boot.name}-"
    program = boot.program(prefix)
    every = [
        program("outlived", f"a 50@401 new={LONG}", "submit a", wants="non_final_chunk window_evicted", chunk=16),
        program(
            "together",
            f"a 5@410 new={LONG}, b 19@411 new={LONG - 9}, c 33@412 new={LONG - 18}",
            "submit a b; step 3; submit c",
            wants="window_evicted batch_grows batch_shrinks",
            chunk=32,
        ),
    ]
    if not boot.engine.radix_cache:
        (chunked,) = shapes(**boot.given, prefix=prefix, only=("chunked-long-prompt",))
        return [*every, chunked.model_copy(update={"wants": (*chunked.wants, "window_evicted_in_prompt")})]
    requests = f"a 40@420 new={LONG}, b 32@420+9@421 new=24, c 40@420+3@422 new=12"
    script, wants = "submit a; step 6; submit b; step 40; submit c", "prefix_hit prefix_hit_past_window window_evicted"
    return [*every, program("shared-prefix", requests, script, wants=wants)]
