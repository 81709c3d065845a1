"""Scenario schema version 1: the spellings before scenarios took SGLang's own setting names.

Files of version 1 are still read, and ids are still hashes over these spellings, so that a scenario keeps its id.
Nothing else may use the old names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.contract.json_files import BadDocument, Spelling
from harness.contract.requests import RequestSpec
from harness.contract.usage import nearest

Names = Mapping[str, str]
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
#: Keys of requests to SGLang's and OpenAI's servers that a scenario has none of, and where what they say stands here.
FOREIGN = {
    "sampling_params": "what is in it stands in the request itself",
    "max_tokens": "SGLang calls it max_new_tokens",
    "max_completion_tokens": "SGLang calls it max_new_tokens",
    "logprobs": "SGLang calls it return_logprob, and top_logprobs_num",
    "response_format": "a schema stands in json_schema",
    "text": "a request has token ids, in input_ids; texts of yours go through --prompts",
    "messages": "a request has token ids, in input_ids; texts of yours go through --prompts",
}
#: kinds of ops
OPS = {"tick": "step", "fault": "mutant"}
NAMES = (SPEC, ENGINE, REQUEST, OPS)


def upgraded(content: Any) -> Any:
    """The data of a scenario file in today's names, whichever version it is of.

    Without a version it is of the first one if it uses a name that only that has. What is not understood stays as it
    is, for the model to refuse. Of version 1 it may use new names too; BadDocument where a value has both.
    """
    if not isinstance(content, Mapping):
        return content
    if of_first(content):
        _check_once(content)
        return _renamed(content, *NAMES) | {"schema_version": 2}
    return content


def of_first(content: Any) -> bool:
    """Whether the data of a scenario file is of version 1."""
    if not isinstance(content, Mapping):
        return False
    version = content.get("schema_version")
    return (type(version) is int and version == 1) or (version is None and _renamed(content, *NAMES) != dict(content))


def spelling(content: Any) -> Spelling:
    """How a scenario file spells what `upgraded` made of it: what a message about it calls a key."""
    if not of_first(content):
        return Spelling(
            today=lambda path, key: _names_at(path).get(key, ""),
            word=lambda path, value: OPS.get(value, "") if path[:1] == ("script",) and path[2:] == ("kind",) else "",
            foreign=_foreign,
        )
    used = {(path, key) for path, one in _objects(content) for key in one}

    def written(path: Sequence[str | int], key: str) -> str:
        old = next((old for old, new in _names_at(path).items() if new == key), key)
        return key if (tuple(path), key) in used else old

    return Spelling(written=written, foreign=_foreign)


def _foreign(path: Sequence[str | int], key: str) -> str:
    near = nearest(key, (*FOREIGN, *RequestSpec.model_fields)) if len(path) == 2 and path[0] == "requests" else ""
    return f"; {FOREIGN[near]}" if near in FOREIGN else ""


def _names_at(path: Sequence[str | int]) -> Names:
    """Version 1's names of the keys of the object at `path`."""
    match tuple(path):
        case ("spec",):
            return SPEC
        case ("engine",):
            return ENGINE
        case ("requests", int()):
            return REQUEST
    return {}


def _check_once(content: Mapping[str, Any]) -> None:
    """BadDocument for an object with one value under both of its names."""
    for path, one in _objects(content):
        for old, new in _names_at(path).items():
            if old in one and new in one:
                place = ".".join(map(str, path))
                raise BadDocument(
                    f"{place}: both {old!r} and {new!r}, which are one setting: {old!r} is its name in version 1\n"
                    f"  leave one of them out"
                )


def _objects(content: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """The objects of a scenario file that have keys of another name in version 1, with their places."""
    for part in ("spec", "engine"):
        if isinstance(content.get(part), Mapping):
            yield (part,), content[part]
    requests = content.get("requests")
    for number, one in enumerate(requests if isinstance(requests, (list, tuple)) else ()):
        if isinstance(one, Mapping):
            yield ("requests", number), one


def downgrade(new: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a valid scenario in the old names, without `schema_version`."""
    old = _renamed(new, *({value: key for key, value in names.items()} for names in NAMES))
    old.pop("schema_version", None)
    return old


def _renamed(data: Mapping[str, Any], spec: Names, engine: Names, request: Names, ops: Names) -> dict[str, Any]:
    made = dict(data)
    for part, names in (("spec", spec), ("engine", engine)):
        if part in made:
            made[part] = _keys(made[part], names)
    if isinstance(made.get("requests"), (list, tuple)):
        made["requests"] = [_keys(one, request) for one in made["requests"]]
    if isinstance(made.get("script"), (list, tuple)):
        made["script"] = [_kind(op, ops) for op in made["script"]]
    return made


def _keys(one: Any, names: Names) -> Any:
    return {names.get(key, key): value for key, value in one.items()} if isinstance(one, Mapping) else one


def _kind(op: Any, names: Names) -> Any:
    if not isinstance(op, Mapping) or not isinstance(op.get("kind"), str):
        return op
    return {**op, "kind": names.get(op["kind"], op["kind"])}
