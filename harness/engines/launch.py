"""Builds the launch of an engine process from a scenario's boot configuration.

It must not start anything and must not import sglang: the result is data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from harness.both_sides import compat, plugin_algorithm
from harness.both_sides.leases import Request
from harness.contract.finding_pages import issues
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.trace import EOS
from harness.engines.envs import EngineEnv, changed, home
from harness.engines.process import REVERT, Launch
from harness.engines.served_models import model_files

CpuAttention = Literal["torch", "interpreted"]

#: What a chunk holds at boot, at least; and the largest that is set afterwards.
BOOT_CHUNK, LARGE_CHUNK = 64, 512

#: Batch sizes that CUDA graphs are captured for: few, so that a boot is quick; with a gap (3) and a largest one that
#: `max_running` exceeds, so that scenarios reach padding and the eager way out.
GRAPH_SIZES = (1, 2, 4)
#: Prompt tokens of a batch that prefill graphs are captured for; SGLang pads up to twice as many as there are.
PREFILL_GRAPH_SIZES = (4, 8, 16, 32, 64, 128, 256, 512)

#: Attends the rows that a layer's indexer chose (DeepSeek-V3.2).
SPARSE = "dsa"
#: Attention backends by device: others need hardware that is not meant here.
BACKENDS = {"cpu": ("triton",), "cuda": ("triton", "flashinfer", "fa3", SPARSE)}

#: Which cores each rank may take.
CORES = "SGLANG_CPU_OMP_THREADS_BIND"

#: Server settings that are SGLang's default unless a scenario asks for them.
ASKED = (
    *("trust_remote_code", "reasoning_parser", "enable_custom_logit_processor", "enable_return_hidden_states"),
    *("max_queued_requests", "enable_mixed_chunk", "enable_dp_lm_head"),
)

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

#: A scenario that does not care says float32, and SGLang's GPU kernels have none.
DTYPES = {"cpu": ("float32",), "cuda": ("float16", "bfloat16")}


def dtype_on(device: str, asked: str) -> str:
    """The dtype an engine on `device` runs in for a scenario that asks for `asked`."""
    return asked if asked in DTYPES[device] else DTYPES[device][0]


def build_launch(
    *,
    env: EngineEnv,
    spec: SpecConfig,
    engine: EngineConfig,
    target: Path,
    draft: Path,
    tokenizer: Path | None = None,
    adapters: Mapping[str, str] = MappingProxyType({}),
    device: str = "cpu",
    probe: bool = True,
    revert: int | None = None,
    cpu_attention: CpuAttention = "torch",
    eos: Sequence[int] | None = None,
    assumed: Sequence[str] = (),
    lease: Request | None = None,
    mutants_in_graphs: bool = False,
) -> Launch:
    """The launch of one boot configuration.

    assumed: ids of known issues; the engine gets the replacement kernels that let it past those it would die of.

    revert puts the fix of that pull request back out, through SGLang's own switch (0.5.13 and later).
    cpu_attention 'interpreted' keeps SGLang's Triton attention kernels, at about four times the cost.
    tokenizer: the folder of the one that the engine is to have, where the target's has none.
    adapters: name -> folder of the LoRA adapters that it serves.
    eos: the tokens that the checkpoint says end a request, () for those SGLang knows; None: none does, unless there is
    a tokenizer, whose EOS SGLang always takes for one.
    lease: the share of a GPU that the engine takes before it starts (see harness.both_sides.leases).
    mutants_in_graphs: CUDA graphs are captured with every mutant that can act there, each behind a flag.
    """
    overlap = engine.overlap_schedule
    if overlap is None:
        overlap = compat.default_overlap(env.version, topk=spec.eagle_topk, device=device)
    folders = {"model_path": str(target), "speculative_draft_model_path": str(draft)}
    boot: dict[str, Any] = {
        "release": env.version,
        "tree": None if env.tree is None else str(env.tree),
        "slimmed": list(env.slimmed),
        "changed_files": list(changed(env)),
        "device": device,
        "probe": "full" if probe else "off",
        "overlap": overlap,
        "cpu_attention": cpu_attention,
        "revert": revert,
        # the others are the reference's matter, and no reason for another engine
        "assumed": [one for one in assumed if issues()[one].replaced_on(device)],
        "lease": None if lease is None else lease.plain(),
        "layered": spec.algorithm == "MTP",
        "model_files": list(model_files(target, draft, package=env.package, server_args=engine.server_args)),
        "plugin": spec.plugin,
        "flags": ["torch.compile off"] if device == "cpu" else [],
        "environment": {
            **_environment(device=device, revert=revert, engine=engine),
            # By default one folder for all: 0.5.23 removes there what it takes for a lock that was left, and 0.5.17,
            # which was compiling, then lost its thread for storage.
            "TORCH_EXTENSIONS_DIR": str(home() / "kernels" / "extensions" / env.version),
            **dict(env.environ),
        },
        "arguments": folders
        | _brought(tokenizer, adapters, device)
        | _arguments(spec, engine, device, overlap=overlap, room=_room(env.version, engine, overlap=overlap)),
        "server_args": engine.server_args,
        "optional_arguments": _optional(engine),
        **_switches(engine, lora=bool(adapters), eos=eos, mutants_in_graphs=mutants_in_graphs),
    }
    return _sides(Launch(python=env.python, pythonpath=env.pythonpath, boot=boot, ranks=engine.tp_size), engine)


def _arguments(spec: SpecConfig, engine: EngineConfig, device: str, *, overlap: bool, room: int) -> dict[str, Any]:
    return {
        "device": device,
        "context_length": engine.context_length,
        "disable_overlap_schedule": not overlap,
        **_speculation(spec, engine),
        **_serving(engine, device),
        "chunked_prefill_size": boot_chunk(engine.page_size, engine.chunked_prefill_size, room=room),
        **engine.server_args,
    }


def _brought(tokenizer: Path | None, adapters: Mapping[str, str], device: str) -> dict[str, Any]:
    """Arguments that name what comes with the checkpoints."""
    found: dict[str, Any] = {} if tokenizer is None else {"tokenizer_path": str(tokenizer)}
    if adapters and device == "cpu":  # the one backend of which no kernel is for a GPU
        found["lora_backend"] = "torch_native"
    return found | ({"lora_paths": dict(adapters)} if adapters else {})


def _switches(
    engine: EngineConfig, *, lora: bool, eos: Sequence[int] | None, mutants_in_graphs: bool
) -> dict[str, Any]:
    """What of a boot record is there only where it is needed."""
    named = eos is not None or not engine.skip_tokenizer_init
    found = {
        "lora": lora,
        "host_cache": bool(engine.server_args.get("enable_hierarchical_cache")),
        "variables": {"enable_overlap_plan_stream": True} if engine.enable_overlap_plan_stream else {},
        "indexer": engine.attention_backend == SPARSE,
        "mutants_in_graphs": mutants_in_graphs and engine.cuda_graph,
    }
    return {name: value for name, value in found.items() if value} | ({EOS: list(eos or ())} if named else {})


def _sides(launch: Launch, engine: EngineConfig) -> Launch:
    """The launch itself, or that of both sides of a hand-over."""
    if not engine.disaggregation:
        return launch
    prefill, decode = (replace(launch, boot=_side(launch.boot, side, engine=engine)) for side in ("prefill", "decode"))
    return replace(prefill, ranks=prefill.boot["arguments"]["tp_size"], beside=decode)


def _side(boot: dict[str, Any], side: str, *, engine: EngineConfig) -> dict[str, Any]:
    """The boot record of one side of a pair. Prompts never run in a graph, whatever the scenario says."""
    own: dict[str, Any] = {"disaggregation_mode": side, "disaggregation_transfer_backend": "nixl"}
    environment, optional = dict(boot["environment"]), dict(boot["optional_arguments"])
    if side == "decode":
        # What it keeps free for each request; SGLang's own 512 would let nothing into a pool that a test can fill.
        own["num_reserved_decode_tokens"] = min(512, engine.max_total_tokens // 8)
        if engine.disaggregation_decode_radix_cache:
            own["disaggregation_decode_enable_radix_cache"] = True
    else:
        own["disable_cuda_graph"] = True
        own["max_total_tokens"] = engine.prefill_side.max_total_tokens
        own["disable_radix_cache"] = not engine.prefill_side.radix_cache
        if (
            engine.dp_size > 1 and "dp_size" not in engine.disaggregation_prefill
        ):  # what is idle beside a hand-over are ranks of the decode side
            own |= {"tp_size": 1, "dp_size": 1, "enable_dp_attention": False}
            own["max_running_requests"] = engine.max_running_requests
            environment.pop(CORES, None)
    if boot["device"] == "cpu":  # newer releases back retracted requests up in memory registered with a GPU
        optional["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return {
        **boot,
        "environment": environment,
        "arguments": boot["arguments"] | own,
        "optional_arguments": optional,
        "handoff": {"side": side},
    }


def _optional(engine: EngineConfig) -> dict[str, Any]:
    """Arguments that only some releases have; each gets those it knows."""
    arguments: dict[str, Any] = {"disable_piecewise_cuda_graph": not engine.prefill_cuda_graph}
    if engine.prefill_cuda_graph:
        sizes = list(PREFILL_GRAPH_SIZES)
        arguments |= {"piecewise_cuda_graph_tokens": sizes, "cuda_graph_bs_prefill": sizes}
    if engine.cuda_graph:
        arguments["disable_prefill_cuda_graph"] = not engine.prefill_cuda_graph
        most = engine.cuda_graph_max_bs
        name, value = ("cuda_graph_bs", list(GRAPH_SIZES)) if most is None else ("cuda_graph_max_bs", most)
        arguments |= {name: value, f"{name}_decode": value}
    return arguments


def _environment(*, device: str, revert: int | None, engine: EngineConfig) -> dict[str, str]:
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    # Slots that no window reaches are given back at once, and not 128 tokens at a time; until 0.5.16 every second
    # verify or so, and not once a window.
    environment |= {"SGLANG_SWA_EVICTION_INTERVAL": "1", "SGLANG_SWA_EVICTION_INTERVAL_MULTIPLIER": "0.25"}
    # The last inputs of short convolutions are kept in bfloat16 otherwise, whatever an engine computes in.
    environment["SGLANG_MAMBA_CONV_DTYPE"], ranks = dtype_on(device, engine.dtype), engine.tp_size
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # torch.compile would only compile small pointwise helpers, and takes 10 s a boot to do it.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        if ranks > 1:  # SGLang wants a NUMA node a rank unless it is given the cores to take
            cores, first = sorted(os.sched_getaffinity(0)), os.getpid() * ranks  # runs side by side take other ones
            environment[CORES] = "|".join(str(cores[(first + rank) % len(cores)]) for rank in range(ranks))
            # With a CUDA build of torch it would find NCCL, and give it ranks on a CPU.
            environment["SGLANG_NCCL_SO_PATH"] = os.devnull
    else:
        # It compiles kernels for quantised matrices at start, which nothing here uses.
        environment["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"
        # By default below TMPDIR, which goes with each engine: nothing that was compiled would be there at the next.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(home() / "kernels" / "inductor")
        # By default each engine starts a compiler a core, for the one small function that SGLang compiles for trees.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        if ranks > 1:  # multicast over NVLink can put the cards of a shared host out of service
            environment |= NO_MULTICAST
            # Engines share cards by their leases, so that one card may well have less memory free than another.
            environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if revert is not None:
        environment[REVERT] = str(revert)
    for name, wanted in (
        ("SGLANG_ENABLE_UNIFIED_RADIX_TREE", engine.enable_unified_radix_tree),
        ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", engine.enable_overlap_plan_stream),
        ("SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", engine.dp_spec_prefill_coordination),
    ):
        environment |= {name: "1"} if wanted else {}
    return environment


def boot_chunk(page: int, chunk: int | None = None, *, room: int = 0) -> int:
    """Tokens of a chunk at boot, whole pages. It only switches chunking on; the gate sets each scenario's own size.

    A large one is booted with: SGLang plans its memory for it. room: tokens that it holds at least.
    """
    asked = chunk if chunk is not None and chunk > LARGE_CHUNK else BOOT_CHUNK
    return -(-max(asked, room) // page) * page


def _room(version: str, engine: EngineConfig, *, overlap: bool) -> int:
    """Tokens that the chunk must hold at boot: all that a batch can, where no larger one would fit afterwards."""
    if not compat.lookup(version, overlap=overlap).room_is_chunk:
        return 0
    pool = max(engine.max_total_tokens, engine.prefill_side.max_total_tokens)
    return -(-pool // engine.page_size) * engine.page_size * engine.dp_size  # it divides the chunk among the ranks


def _speculation(spec: SpecConfig, engine: EngineConfig) -> dict[str, Any]:
    """SGLang knows multi-layer MTP as EAGLE with a switch, which it sets by itself for MiMo-V2 style targets."""
    algorithm = "EAGLE" if spec.algorithm == "MTP" else spec.algorithm
    arguments: dict[str, Any] = {
        "speculative_algorithm": plugin_algorithm.NAMES[spec.plugin] if spec.plugin else algorithm,
        "speculative_num_steps": spec.num_steps,
        "speculative_eagle_topk": spec.eagle_topk,
        "speculative_num_draft_tokens": spec.num_draft_tokens,
    }
    if spec.adaptive is not None:
        arguments |= {"speculative_adaptive": True, "speculative_adaptive_config": spec.adaptive}
    if spec.token_map is not None:
        arguments["speculative_token_map"] = list(spec.token_map)
    if engine.rejection_sampling:
        arguments["speculative_use_rejection_sampling"] = True
    return arguments


def _serving(engine: EngineConfig, device: str) -> dict[str, Any]:
    return {
        "dtype": dtype_on(device, engine.dtype),
        "attention_backend": engine.attention_backend,
        "sampling_backend": "pytorch",
        "grammar_backend": engine.grammar_backend,
        "skip_tokenizer_init": engine.skip_tokenizer_init,
        "disable_cuda_graph": not engine.cuda_graph,
        # Else each capture ends with all that was imported in the collector's sight again, and looked through.
        "enable_cudagraph_gc": engine.cuda_graph,
        "disable_radix_cache": not engine.radix_cache,
        "page_size": engine.page_size,
        "max_running_requests": engine.max_running_requests * engine.dp_size,  # SGLang divides it among the ranks
        "tp_size": engine.tp_size,
        "dp_size": engine.dp_size,
        "enable_dp_attention": engine.dp_size > 1,
        "disable_custom_all_reduce": engine.tp_size > 1,  # collectives are NCCL's and gloo's business, not ours
        "enable_priority_scheduling": engine.priority_scheduling,
        "enable_deterministic_inference": engine.deterministic_inference,
        "disable_hybrid_swa_memory": engine.disable_hybrid_swa_memory,
        "max_total_tokens": engine.max_total_tokens,
        "schedule_conservativeness": engine.schedule_conservativeness,
        "mem_fraction_static": engine.mem_fraction_static or 0.5,
        "random_seed": 0,
        **{name: value for name in ASKED if (value := getattr(engine, name))},
        "log_level": "info",
    }
