"""Short scenarios made by hand: for tests, and the exercises of `exercises.toml`, in which mutants can show.

Pure data; it must not know which mutants there are, and must not import torch or sglang.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases.boots import BY_NAME, spec_of
from cases.fixed import CHAIN, CHECKPOINT, boot_program, default_scenarios, of_table, requests_of
from cases.fixed_hicache import host_shapes
from cases.fixed_parts import joining, on_boot
from cases.fixed_weights import adapter_shapes, weight_shapes
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig

#: The default scenarios by name.
DEFAULT = {scenario.name: scenario for scenario in default_scenarios()}


def program(
    name: str,
    requests: str | Sequence[RequestSpec],
    script: str | Sequence[Op],
    *,
    spec: SpecConfig = CHAIN,
    wants: str = "",
    checkpoint: str = CHECKPOINT,
    chunk: int | None = None,
    **engine: Any,
) -> Scenario:
    """`engine` are fields of EngineConfig, and cost a boot of their own."""
    boot: dict[str, Any] = {"spec": spec, "checkpoint": checkpoint, "engine": EngineConfig(**engine)}
    return boot_program(name, requests, script, prefix="", wants=wants, chunk=chunk, **boot)


#: Chunks, a shared budget and a growing batch, in as few steps as that takes.
CHUNKED_BATCH = program(
    "chunked-batch",
    "a 19@1 new=6, b 23@2 new=6, c 5@3 new=4",
    "submit a b; step 4; submit c",  # three steps of prefill, one verify, then c
    wants="non_final_chunk batch_grows",
    chunk=16,
)


def _exercise(name: str, row: dict[str, Any], shared: dict[str, dict[str, Any]]) -> Scenario:
    row = {**shared.get(row.get("like", ""), {}), **row}
    boot, asks = BY_NAME[row.get("boot", "plain")], row.get("asks", {})
    requests = [
        RequestSpec.model_validate(one.model_dump() | asks.get(one.rid, {})) for one in requests_of(row["requests"])
    ]
    return boot_program(
        name,
        requests,
        row["script"],
        prefix="",
        wants=row.get("wants", ""),
        chunk=row.get("chunk"),
        checkpoint=row.get("checkpoint", boot.checkpoint),
        spec=spec_of(row["spec"]) if "spec" in row else boot.spec,
        engine=boot.engine.model_copy(update=row.get("engine", {})),
    )


def _exercises() -> dict[str, tuple[Scenario, ...]]:
    tables = tomllib.loads((Path(__file__).parent / "exercises.toml").read_text())
    shared = tables.pop("shared")
    return {need: tuple(_exercise(name, row, shared) for name, row in rows.items()) for need, rows in tables.items()}


_WEIGHTS = weight_shapes(BY_NAME["weights"])
#: Need of a mutant -> what to drive, in this order.
EXERCISES: dict[str, tuple[Scenario, ...]] = {
    **_exercises(),
    "mixed": (joining(BY_NAME["mixed"]),),
    "adapters": tuple(adapter_shapes(BY_NAME["lora"])[:1]),
    "draft-update": tuple(one for one in _WEIGHTS if one.name == "weights-tensor-draft"),
    "memory": tuple(one for one in _WEIGHTS if one.name == "weights-memory"),
    "host": tuple(one for one in host_shapes(BY_NAME["hicache"]) if one.name == "hicache-again"),
    "storage": tuple(host_shapes(BY_NAME["hicache-storage"])[:1]),
    "dp-layers": tuple(
        of_table("ranks", **BY_NAME["dp-layers-head"].given, prefix="layers-head-", only=("held-back",))
    ),
    "adaptive": tuple(on_boot(BY_NAME["adaptive"], only=("four-together",))),
}
