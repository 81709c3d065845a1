"""Turns a scenario's boot configuration into what one engine process needs to start.

It must not start anything and must not import sglang: the result is data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from harness import compat
from harness.engine import Launch
from harness.envs import EngineEnv
from harness.types import EngineConfig, SpecConfig

CpuAttention = Literal["torch", "interpreted"]

#: Tokens a request may grow to; the tiny checkpoints have as many positions.
CONTEXT_LENGTH = 512


def build_launch(
    *,
    env: EngineEnv,
    spec: SpecConfig,
    engine: EngineConfig,
    target: Path,
    draft: Path,
    device: str = "cpu",
    probe: bool = True,
    revert: int | None = None,
    cpu_attention: CpuAttention = "torch",
    context_length: int = CONTEXT_LENGTH,
    assumed: Sequence[str] = (),
) -> Launch:
    """The launch of one boot configuration.

    assumed: ids of harness.deviations; the engine gets the stand-ins that let it past those it would die of.

    revert puts the fix of that pull request back out, through SGLang's own switch (0.5.13 and later).
    cpu_attention 'interpreted' keeps SGLang's Triton attention kernels, at about four times the cost.
    """
    overlap = engine.overlap
    if overlap is None:
        overlap = compat.default_overlap(env.version, topk=spec.t, device=device)
    boot: dict[str, Any] = {
        "release": env.version,
        "device": device,
        "probe": probe,
        "overlap": overlap,
        "cpu_attention": cpu_attention,
        "revert": revert,
        "assumed": list(assumed),
        "flags": ["torch.compile off"] if device == "cpu" else [],
        "environment": _environment(device=device, revert=revert, ranks=engine.tp),
        "arguments": _arguments(
            spec=spec, engine=engine, target=target, draft=draft, device=device, context_length=context_length
        )
        | {"disable_overlap_schedule": not overlap},
        # Only passed where the release still has them.
        "optional_arguments": {"disable_piecewise_cuda_graph": True},
    }
    return Launch(python=env.python, pythonpath=env.pythonpath, boot=boot, ranks=engine.tp)


def _environment(*, device: str, revert: int | None, ranks: int) -> dict[str, str]:
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if device == "cpu":
        # torch.compile would only compile small pointwise helpers, and takes 10 s a boot to do it.
        environment |= {
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        if ranks > 1:  # SGLang wants a NUMA node a rank unless told which cores to take
            cores = sorted(os.sched_getaffinity(0))
            binding = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = binding
    if revert is not None:
        environment["SGLANG_DEBUG_REVERT_PR"] = str(revert)
    return environment


def _arguments(
    *, spec: SpecConfig, engine: EngineConfig, target: Path, draft: Path, device: str, context_length: int
) -> dict[str, Any]:
    return {
        "model_path": str(target),
        "speculative_algorithm": spec.algorithm,
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": spec.k,
        "speculative_eagle_topk": spec.t,
        "speculative_num_draft_tokens": spec.n,
        "device": device,
        "dtype": engine.dtype,
        "attention_backend": engine.backend,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": not engine.graphs,
        "disable_radix_cache": not engine.prefix_cache,
        "page_size": engine.page,
        "max_running_requests": engine.max_running * engine.dp,  # SGLang divides it among the ranks
        "tp_size": engine.tp,
        "dp_size": engine.dp,
        "enable_dp_attention": engine.dp > 1,
        "enable_priority_scheduling": engine.priority,
        "max_total_tokens": engine.pool_tokens,
        # A boot-time chunk only switches chunking on; the gate sets each scenario's own size.
        "chunked_prefill_size": 64,
        "context_length": context_length,
        "mem_fraction_static": 0.5,
        "random_seed": 0,
        "log_level": "info",
    }
