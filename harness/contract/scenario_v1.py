"""Scenario schema version 1: the spellings before scenarios took SGLang's own setting names.

Files of version 1 are still read, and ids are still hashes over these spellings, so that a scenario keeps its id.
Nothing else may use the old names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPEC = {"k": "num_steps", "t": "eagle_topk", "n": "num_draft_tokens"}
ENGINE = {
    "dp": "dp_size",
    "tp": "tp_size",
    "page": "page_size",
    "overlap": "overlap_schedule",
    "graphs": "cuda_graph",
    "backend": "attention_backend",
    "prefix_cache": "radix_cache",
    "max_running": "max_running_requests",
    "priority": "priority_scheduling",
    "pool_tokens": "max_total_tokens",
    "chunk": "chunked_prefill_size",
    "pd": "disaggregation",
    "decode_cache": "disaggregation_decode_radix_cache",
    "deterministic": "deterministic_inference",
    "rejection": "rejection_sampling",
}
REQUEST = {"prompt": "input_ids", "seed": "sampling_seed", "stop_ids": "stop_token_ids"}
#: kinds of ops
OPS = {"tick": "step", "fault": "mutant"}


def upgraded(content: Any) -> Any:
    """The data of a scenario file in today's names, whichever version it is of.

    Without a version it is of the first one if it uses a name that only that has. What is not understood stays as it
    is, for the model to refuse.
    """
    if not isinstance(content, Mapping):
        return content
    version = content.get("schema_version")
    renamed = _renamed(content, SPEC, ENGINE, REQUEST, OPS)
    if (type(version) is int and version == 1) or (version is None and renamed != dict(content)):
        return renamed | {"schema_version": 2}
    return content


def downgrade(new: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a valid scenario in the old names, without `schema_version`."""
    old = _renamed(new, *({value: key for key, value in names.items()} for names in (SPEC, ENGINE, REQUEST, OPS)))
    old.pop("schema_version", None)
    return old


def _renamed(
    data: Mapping[str, Any],
    spec: Mapping[str, str],
    engine: Mapping[str, str],
    request: Mapping[str, str],
    ops: Mapping[str, str],
) -> dict[str, Any]:
    made = dict(data)
    for part, names in (("spec", spec), ("engine", engine)):
        if isinstance(made.get(part), Mapping):
            made[part] = {names.get(key, key): value for key, value in made[part].items()}
    if isinstance(made.get("requests"), (list, tuple)):
        made["requests"] = [_keys(one, request) for one in made["requests"]]
    if isinstance(made.get("script"), (list, tuple)):
        made["script"] = [_kind(op, ops) for op in made["script"]]
    return made


def _keys(one: Any, names: Mapping[str, str]) -> Any:
    return {names.get(key, key): value for key, value in one.items()} if isinstance(one, Mapping) else one


def _kind(op: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(op, Mapping) or not isinstance(op.get("kind"), str):
        return op
    return {**op, "kind": names.get(op["kind"], op["kind"])}
