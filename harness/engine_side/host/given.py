"""What an engine is, and what it runs with by the names of its arguments, read off it after boot.

Engine side: SGLang's objects only. It must not judge: what was asked for stands beside it in the trace header.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..probes.graph_probe import GraphProbe
from ..probes.probe import Probe
from .import_patches import release_of
from .scheduler_state import pool_level

#: Arguments that say where something is, or that each scenario sets anew.
NAMED = {"model_path", "speculative_draft_model_path", "log_level", "chunked_prefill_size"}
#: Arguments that the scheduler keeps in another form, or that it has by an environment variable -> how they are read.
HELD = {
    "enable_overlap_plan_stream": lambda scheduler: getattr(scheduler.draft_worker, "plan_stream", None) is not None,
    "disable_overlap_schedule": lambda scheduler: not scheduler.enable_overlap,
    "max_total_tokens": lambda scheduler: int(scheduler.max_total_num_tokens),
    "dp_size": lambda scheduler: _attention_ranks(scheduler),
    "enable_dp_attention": lambda scheduler: _attention_ranks(scheduler) > 1,
    "max_queued_requests": lambda scheduler: scheduler.max_queued_requests,
    "page_size": lambda scheduler: int(scheduler.token_to_kv_pool_allocator.page_size),
    # It is given as a file.
    "speculative_adaptive_config": lambda scheduler: _content(scheduler.server_args.speculative_adaptive_config),
    "speculative_token_map": lambda scheduler: _token_map(scheduler.server_args.speculative_token_map),
    "lora_paths": lambda scheduler: {
        one.lora_name: one.lora_path for one in _argument(scheduler.server_args, "lora_paths")
    },
    "context_length": lambda scheduler: int(scheduler.model_config.context_len),
}


def given(scheduler: Any, names: Iterable[str]) -> dict[str, Any]:
    """Name -> value of those of the names that this release has; what JSON has no word for as text."""
    found = {}
    for name in names:
        value = HELD[name](scheduler) if name in HELD else _argument(scheduler.server_args, name)
        if value is not _NONE:
            found[name] = value if isinstance(value, bool | int | float | str | list | dict | None) else str(value)
    return found


_NONE = object()


def _attention_ranks(scheduler: Any) -> int:
    """Ranks of DP attention; 0.5.23 keeps them apart from replicas, which `dp_size` then counts."""
    own = _argument(scheduler.server_args, "attn_dp_size")
    return int(own if isinstance(own, int) and own > 1 else _argument(scheduler.server_args, "dp_size"))


def _token_map(path: str | None) -> Any:
    return None if path is None else torch.load(path, weights_only=True)


def _content(path: str | None) -> Any:
    return None if path is None else json.loads(Path(path).read_text())


def _argument(server_args: Any, name: str) -> Any:
    """An argument as it was resolved: newer releases leave what was typed as it is, and keep that beside it."""
    try:
        return importlib.import_module("sglang.srt.runtime_context").get_context().config_leaf(name)
    except (ImportError, AttributeError, ValueError):
        return getattr(server_args, name, _NONE)


def models(scheduler: Any) -> dict[str, str]:
    """The classes of the models that run, as module:class, by target and draft; of a draft with several, the first."""
    worker = getattr(scheduler, "draft_worker", None)
    inner = getattr(worker, "draft_worker", None) or worker
    several = getattr(inner, "draft_runners", None) or getattr(inner, "draft_runner_list", None) or ()
    one = getattr(inner, "draft_runner", None) or getattr(inner, "draft_model_runner", None)
    runners = {
        "target": getattr(getattr(scheduler, "tp_worker", None), "model_runner", None),
        "draft": next(iter(several), one),
    }
    found = {side: getattr(runner, "model", None) for side, runner in runners.items()}
    return {
        side: f"{type(model).__module__}:{type(model).__qualname__}"
        for side, model in found.items()
        if model is not None
    }


def facts(scheduler: Any, boot: dict[str, Any], probe: Probe) -> dict[str, Any]:
    """What the handshake says of it."""
    return {**_versions(boot), **_engine(scheduler, boot, probe.graphs), **_seen(probe, boot)}


def _engine(scheduler: Any, boot: dict[str, Any], graphs: GraphProbe | None) -> dict[str, Any]:
    """What was asked of SGLang, and what it runs with."""
    wanted = boot["optional_arguments"] | boot["arguments"] | boot.get("variables", {})
    return {
        "worker": type(scheduler.model_worker).__name__,
        "overlap": bool(getattr(scheduler, "enable_overlap", boot["overlap"])),
        "graphs": {} if graphs is None else graphs.sizes(),
        "backend": boot["arguments"]["attention_backend"],
        "dtype": boot["arguments"]["dtype"],
        "asked": {name: value for name, value in wanted.items() if name not in NAMED},
        "given": given(scheduler, set(wanted) - NAMED) | _compiled(boot, graphs),
        "models": models(scheduler),
        "eos_token_ids": _eos(scheduler, boot.get("eos_token_ids")),
        "pool": pool_level(scheduler),
        **{name: boot[name] for name in ("revert", "flags", "probe")},
        **{name: boot[name] for name in ("slimmed", "changed_files", "server_args") if boot.get(name)},
    }


def _compiled(boot: dict[str, Any], graphs: GraphProbe | None) -> dict[str, bool]:
    """What became of torch.compile, where it was asked for: SGLang goes without it where a model does not let it."""
    asked = boot["arguments"].get("enable_torch_compile") and boot["probe"] == "full"
    return {"enable_torch_compile": graphs is not None and bool(graphs.compiled)} if asked else {}


def _seen(probe: Probe, boot: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of it, and how."""
    release, staging = release_of(boot), probe.recorder.staging
    return {
        "worker_generation": release.generation,
        "truncates_at_finish": release.truncates_at_finish,
        "hooks_found": probe.hooks.found,
        "hooks_missing": probe.hooks.missing,
        **({} if staging is None else {"copies": staging.batches}),
    }


def _eos(scheduler: Any, named: list[int] | None) -> list[int]:
    """The tokens that end a request: those the checkpoint names, else SGLang's; none of a pair of ours (None)."""
    if named is None:
        return []
    known = sorted(getattr(scheduler.model_config, "hf_eos_token_id", None) or ())
    return named or [one for one in known if one < scheduler.model_config.vocab_size]


def _versions(boot: dict[str, Any]) -> dict[str, Any]:
    """Of SGLang, torch and the card; tree: the folder that a commit's SGLang was imported from."""
    import sglang

    tree = {} if boot.get("tree") is None else {"tree": str(Path(str(sglang.__file__)).resolve().parents[1])}
    card = torch.cuda.get_device_name() if boot["device"] == "cuda" else ""
    return {"release": sglang.__version__, **tree, "torch": torch.__version__, "device": boot["device"], "card": card}
