"""Short scenarios that tests write by hand, all on the boot configuration of the default ones unless they say so.

Pure data; it must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cases.fixed import CHECKPOINT, DRAIN, default_scenarios, request, submit, tick
from harness.contract.types import EngineConfig, Op, RequestSpec, Scenario, SpecConfig

#: The default scenarios by name.
DEFAULT = {scenario.name: scenario for scenario in default_scenarios()}


def program(
    name: str,
    requests: Sequence[RequestSpec],
    script: Sequence[Op],
    *,
    wants: Sequence[str] = (),
    k: int = 3,
    **engine: Any,
) -> Scenario:
    """A chain scenario; `engine` are fields of EngineConfig, and any but `chunk` costs a boot of its own."""
    return Scenario(
        name=name,
        checkpoint=CHECKPOINT,
        spec=SpecConfig(k=k, t=1, n=k + 1),
        engine=EngineConfig(**engine),
        requests=tuple(requests),
        script=tuple(script),
        wants=tuple(wants),
    )


#: Chunks, a shared budget and a growing batch, in as few turns as that takes.
CHUNKED_BATCH = program(
    "chunked-batch",
    [request("a", 19, seed=1, new=6), request("b", 23, seed=2, new=6), request("c", 5, seed=3, new=4)],
    [submit("a", "b"), tick(4), submit("c"), DRAIN],  # three turns of prefill, one verify, then c
    wants=["non_final_chunk", "batch_grows"],
    chunk=16,
)
