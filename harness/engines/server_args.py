"""Arguments of SGLang's own that go to it as they are, and those that a run sets itself. It must not start anything."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.contract.settings import EngineConfig
from harness.contract.usage import UsageError, meant
from harness.engines.declared_arguments import declared

#: Said of what is the same for every engine.
FIXED = "every engine is started with eaglecheck's own"

#: SGLang's argument -> what sets it here; those called as a field of EngineConfig are set by that.
OURS: dict[str, str] = {
    **{name: f"engine.{name}" for name in EngineConfig.model_fields},
    "model_path": "--target, or checkpoint in a scenario file",
    "speculative_draft_model_path": "--draft, or checkpoint in a scenario file",
    "device": "--device",
    "speculative_algorithm": "spec.algorithm",
    "speculative_num_steps": "spec.num_steps",
    "speculative_eagle_topk": "spec.eagle_topk",
    "speculative_num_draft_tokens": "spec.num_draft_tokens",
    "speculative_token_map": "spec.token_map",
    **dict.fromkeys(("speculative_adaptive", "speculative_adaptive_config"), "spec.adaptive"),
    "tokenizer_path": "--target",
    "speculative_use_rejection_sampling": "engine.rejection_sampling",
    "disable_overlap_schedule": "engine.overlap_schedule",
    "disable_cuda_graph": "engine.cuda_graph",
    **dict.fromkeys(
        (
            *("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph"),
            *("cuda_graph_bs_prefill", "piecewise_cuda_graph_tokens"),
        ),
        "engine.prefill_cuda_graph",
    ),
    "disable_radix_cache": "engine.radix_cache",
    "enable_dp_attention": "engine.dp_size",
    "enable_priority_scheduling": "engine.priority_scheduling",
    "enable_deterministic_inference": "engine.deterministic_inference",
    "disaggregation_mode": "engine.disaggregation",
    "disaggregation_decode_enable_radix_cache": "engine.disaggregation_decode_radix_cache",
    **dict.fromkeys(("cuda_graph_max_bs_decode", "cuda_graph_bs", "cuda_graph_bs_decode"), "engine.cuda_graph_max_bs"),
    **dict.fromkeys(
        (
            *("sampling_backend", "disable_custom_all_reduce", "random_seed", "log_level", "enable_cudagraph_gc"),
            *("host", "port", "nccl_port"),
            *("disaggregation_transfer_backend", "num_reserved_decode_tokens", "disaggregation_bootstrap_port"),
            "disaggregation_decode_retraction_backup",
        ),
        FIXED,
    ),
}


#: Fields of EngineConfig that options of the command line set.
OPTIONS = {
    **{
        name: "--" + name.replace("_", "-")
        for name in (
            *("dtype", "attention_backend", "page_size", "context_length", "chunked_prefill_size"),
            *("max_running_requests", "max_total_tokens", "cuda_graph_max_bs", "mem_fraction_static"),
            "trust_remote_code",
        )
    },
    "cuda_graph": "--cuda-graph or --disable-cuda-graph",
    "prefill_cuda_graph": "--prefill-cuda-graph or --disable-prefill-cuda-graph",
    "overlap_schedule": "--overlap-schedule or --disable-overlap-schedule",
    "enable_overlap_plan_stream": "--enable-overlap-plan-stream or --disable-overlap-plan-stream",
    "disable_hybrid_swa_memory": "--disable-hybrid-swa-memory or --hybrid-swa-memory",
}


#: What would have threads of its own decide in which step something happens.
NOT_IN_LOCKSTEP = ("enable_lmcache", "enable_flexkv")
#: Storage that needs no service, and policies that ask no clock; SGLang's default is "timeout".
STORAGE, PREFETCH = "file", ("wait_complete", "best_effort")


def taken(server_args: Mapping[str, Any]) -> Iterator[str]:
    """A message for each that something else sets, or that no run can have."""
    for name in server_args:
        if name in NOT_IN_LOCKSTEP:
            yield f"engine.server_args has {name}, whose threads decide what a step does\n  leave it out"
        if name in OURS:
            instead = "leave it out" if OURS[name] == FIXED else f"set {_set_by(OURS[name])}"
            yield f"engine.server_args has {name}, which eaglecheck sets itself\n  {instead}"
    if server_args.get("pp_size", 1) != 1:
        yield (
            "engine.server_args has pp_size, whose stages are ranks that nothing here joins\n"
            "  leave it out; two stages beside one, untraced:  python -m benchmarks.pipeline"
        )
    if (backend := server_args.get("hicache_storage_backend", STORAGE)) != STORAGE:
        yield f"engine.server_args.hicache_storage_backend is {backend!r}, a service of its own\n  allowed: {STORAGE!r}"
    policy = server_args.get("hicache_storage_prefetch_policy", "timeout")
    if "hicache_storage_backend" in server_args and policy not in PREFETCH:
        yield (
            f"engine.server_args.hicache_storage_prefetch_policy is {policy!r}, by which the clock decides what a step "
            f"does\n  allowed: {' or '.join(map(repr, PREFETCH))}"
        )


def _set_by(ours: str) -> str:
    """engine.KEY, behind the option that sets it where there is one."""
    option = OPTIONS.get(ours.removeprefix("engine."))
    return f"{option}, or {ours} in a scenario file" if option else ours


def read(typed: Sequence[str]) -> dict[str, Any] | None:
    """`name=value` as the command line has them; a name alone is a switch, and a value that is no JSON is text."""
    found: dict[str, Any] = {}
    for one in typed:
        name, equals, value = one.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not name.isidentifier():
            raise UsageError(f"--server-arg {one}\n  type it as  --server-arg NAME=VALUE, by SGLang's name")
        if name in found:
            raise UsageError(f"--server-arg {one}: {name} is named twice\n  name it once")
        found[name] = _value(value) if equals else True
    return found or None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def typed(server_args: Mapping[str, Any]) -> str:
    """What `read` makes them of, as a shell takes it: a text that would be read as JSON is one in JSON."""
    plain = {name for name, value in server_args.items() if isinstance(value, str) and _value(value) == value}
    values = ((name, value if name in plain else json.dumps(value)) for name, value in server_args.items())
    return " ".join(f"--server-arg {shlex.quote(f'{name}={value}')}" for name, value in values)


def not_taken(server_args: Mapping[str, Any], *, version: str, package: Path | None) -> str:
    """Why a release does not take these, as its sources declare its arguments; empty if it does, or cannot be read.

    package: the release's folder `sglang`. Nothing of it is imported.
    """
    arguments = declared(package) if server_args and package is not None else {}
    for name, value in server_args.items() if "model_path" in arguments else ():
        if name not in arguments:
            return (
                f"engine.server_args has {name}, and SGLang {version} has no such argument{meant(name, arguments)}\n"
                f"  leave --server-arg {name} out, or type it as  --server-arg NAME=VALUE, by SGLang's name"
            )
        if allowed := arguments[name].refuses(value):
            return f"engine.server_args.{name} is {value!r}, which SGLang {version} does not take\n  allowed: {allowed}"
    return ""
