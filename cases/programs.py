"""Short scenarios that tests write by hand, all on the boot configuration of the default ones unless they say so.

Pure data; it must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cases.fixed import CHECKPOINT, default_scenarios
from harness.types import EngineConfig, Op, RequestSpec, Scenario, SpecConfig

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
