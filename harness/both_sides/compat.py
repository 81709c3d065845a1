"""Which SGLang names to hook in which release: the one place that changes when a release is added.

Engine side: standard library only. It must hold data and look-ups, no behaviour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

#: (module, what, argument); `what` names a `_patch_*` method of cpu_ops.CpuOps, or one of its KERNELS.
Patch = tuple[str, str, str]

_SPEC = "sglang.srt.speculative"
_KERNELS = "sglang.kernels.ops"
_OLD_ATTENTION = "sglang.srt.layers.attention.triton_ops"


def parse(version: str) -> tuple[int, int, int, int]:
    """'0.5.12.post1' -> (0, 5, 12, 1); development suffixes are dropped. ValueError if it is no version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    if match is None:
        raise ValueError(f"not an SGLang version: {version!r} (expected something like 0.5.23)")
    major, minor, patch, post = match.groups()
    return int(major), int(minor), int(patch), int(post or 0)


@dataclass(frozen=True)
class Release:
    """Hook targets of one range of releases.

    gate: where the scheduler asks for requests. worker/draft: module and class of the EAGLE worker that drives a
    round and of the one that drafts (one class in the v1 worker). sample: (module, name) that returns
    (predict, accept_lens, accept_index), or None where the worker's `verify` result is read instead. greedy: the
    module whose `verify_tree_greedy_func` walks the tree for it. alarm: where SGLang checks its own pool when idle.
    dp_patches: what DP attention needs on a CPU as well. idle_patches: what lets an idle rank past its crash, F-007.
    mtp_patches: what the multi-layer worker needs on a CPU. mtp_plan_patches: what plans each eager forward, F-011.
    """

    first: str
    gate: tuple[str, str]
    worker_module: str
    worker: str
    draft: str
    draft_prefill: str
    draft_extend: str
    sample: tuple[str, str] | None
    greedy: str
    alarm: str
    patches: tuple[Patch, ...]
    dp_patches: tuple[Patch, ...]
    idle_patches: tuple[Patch, ...]
    truncates_at_finish: bool
    overlap: bool | None = None  # the scheduling this row is for; None: either
    mtp_patches: tuple[Patch, ...] = ()
    mtp_plan_patches: tuple[Patch, ...] = ()
    # of `multi_layer` alone:
    plan_patches: tuple[Patch, ...] = ()
    layered: bool = False  # proposals come from one draft forward a layer instead of draft steps

    @property
    def generation(self) -> str:
        return "v1" if self.sample is None else "v2"


_LLAMA = ("sglang.srt.models.llama", "cuda_noop", "synchronize,empty_cache")
#: Its layers take their dtype from the checkpoint's config instead of the engine's.
_GPT_OSS = ("sglang.srt.models.gpt_oss", "config_dtype", "GptOssForCausalLM")


def _attention(decode_module: str, extend_module: str) -> tuple[Patch, ...]:
    return ((decode_module, "attention", "decode_attention_fwd"), (extend_module, "attention", "extend_attention_fwd"))


_ATTENTION_OLD = _attention(f"{_OLD_ATTENTION}.decode_attention", f"{_OLD_ATTENTION}.extend_attention")
_ATTENTION_NEW = _attention(f"{_KERNELS}.attention.decode_attention", f"{_KERNELS}.attention.extend_attention")
_OWN_TREE = ((f"{_SPEC}.eagle_utils", "tree", ""), (f"{_SPEC}.eagle_utils", "verify", ""))
_SCHEDULER_GATE = ("sglang.srt.managers.scheduler", "Scheduler.recv_requests")
_RECEIVER_GATE = ("sglang.srt.managers.scheduler_components.request_receiver", "SchedulerRequestReceiver.recv_requests")

_PATCHES_0_5_11 = (
    _LLAMA,
    _GPT_OSS,
    *_ATTENTION_OLD,
    *_OWN_TREE,
    (f"{_SPEC}.eagle_info_v2", "flag", "_is_musa=none"),
    (f"{_SPEC}.eagle_info_v2", "sampling", ""),
)

_ROPE = ("sglang.srt.layers.rotary_embedding.base", "empty_rope", "")
_DP_OLD = (
    _ROPE,
    ("sglang.srt.model_executor.forward_batch_info", "unpinned", ""),
    (f"{_SPEC}.eagle_info", "cpu_device", ""),
    ("sglang.srt.distributed.parallel_state", "unregistered", "all_gather_into_tensor"),
    ("sglang.srt.distributed.parallel_state", "unregistered", "reduce_scatter_tensor"),
)
#: Under DP attention a decode side of 0.5.23 exchanges logits where all ranks verify equally many tokens.
_DP_0_5_23 = (*_DP_OLD, ("sglang.srt.distributed.parallel_state", "unregistered", "all_to_all_single"))
_IDLE = (("sglang.srt.layers.attention.triton_backend", "idle_metadata", ""),)

#: What the host cache (`enable_hierarchical_cache`) needs on a CPU, where its pools are modules of their own.
HICACHE_ON_A_CPU: tuple[Patch, ...] = (
    ("sglang.srt.mem_cache.pool_host.common", "unregistered_host", "_cuda_host_register"),
    ("sglang.srt.mem_cache.pool_host.base", "unreserved_host", "HICACHE_HOST_MEMORY_RESERVE_BYTES"),
    ("sglang.srt.mem_cache.pool_host.mha", "host_copies", ""),
    ("sglang.srt.mem_cache.pool_host.mla", "host_copies", ""),
    ("sglang.srt.mem_cache.pool_host.mha", "unpinned", ""),
    ("sglang.srt.mem_cache.pool_host.mla", "unpinned", ""),
)
#: What the overlap loop needs on a CPU; from 0.5.17 on SGLang takes it back there for everything that speculates.
LORA_ON_A_CPU: tuple[Patch, ...] = (
    ("sglang.srt.lora.layers", "unpinned", ""),
    ("sglang.srt.lora.backend.torch_backend", "unpinned", "everywhere"),
)
OVERLAP_ON_A_CPU: tuple[Patch, ...] = (
    ("sglang.srt.managers.scheduler", "record_stream", ""),
    ("sglang.srt.arg_groups.speculative_hook", "kept", "_disable_overlap_schedule_for_cpu"),
)

_MTP_WORKER = f"{_SPEC}.multi_layer_eagle_worker_v2"
#: This worker builds the parents of a chain of two or more on the device called "cuda", whatever it runs on.
_MTP_CUDA = ((_MTP_WORKER, "device_name", "full"),)
#: Its eager draft extends under DP attention share one batch, which each layer pads: F-091.
LAYER_BATCHES: tuple[Patch, ...] = ((_MTP_WORKER, "layer_batches", "MultiLayerEagleDraftWorker"),)
#: Its eager forwards run on what an earlier forward planned.
_MTP_PLAN = (("sglang.srt.model_executor.forward_batch_info", "unplanned", "mark_forward_metadata_ready"),)

_V1 = Release(
    first="0.5.11",
    gate=_SCHEDULER_GATE,
    worker_module=f"{_SPEC}.eagle_worker",
    worker="EAGLEWorker",
    draft="EAGLEWorker",
    draft_prefill="forward_draft_extend",
    draft_extend="forward_draft_extend_after_decode",
    sample=None,
    greedy=f"{_SPEC}.eagle_info",
    alarm="sglang.srt.managers.scheduler_runtime_checker_mixin",
    patches=_PATCHES_0_5_11,
    dp_patches=_DP_OLD,
    idle_patches=_IDLE,
    truncates_at_finish=True,
    overlap=False,
)
# Up to 0.5.12.post1 the v2 worker exists only under overlap scheduling, which is the default there.
_V2 = Release(
    first="0.5.11",
    gate=_SCHEDULER_GATE,
    worker_module=f"{_SPEC}.eagle_worker_v2",
    worker="EAGLEWorkerV2",
    draft="EagleDraftWorker",
    draft_prefill="_draft_extend_for_prefill",
    draft_extend="_draft_extend_for_decode",
    sample=(f"{_SPEC}.eagle_info_v2", "EagleVerifyInputV2Mixin.sample"),
    greedy=f"{_SPEC}.eagle_info_v2",
    alarm="sglang.srt.managers.scheduler_runtime_checker_mixin",
    patches=_PATCHES_0_5_11,
    dp_patches=_DP_OLD,
    idle_patches=_IDLE,
    truncates_at_finish=False,
    overlap=True,
    mtp_patches=_MTP_CUDA,
)
_V2_ONLY = replace(
    _V2, gate=_RECEIVER_GATE, alarm="sglang.srt.managers.scheduler_components.invariant_checker", overlap=None
)

_LOCS_OLD = (f"{_SPEC}.triton_ops.cache_locs", "flag", "_is_musa=none")
_LOCS_NEW = (f"{_KERNELS}.speculative.cache_locs", "flag", "_is_musa=none")
#: Of models with recurrent states alone.
_RECURRENT = (
    ("sglang.srt.layers.attention.linear.kernels.gdn_triton", "delta_rule", ""),
    ("sglang.srt.layers.attention.mamba.mamba", "portable_conv", f"{_KERNELS}.mamba.causal_conv1d_triton"),
    (f"{_KERNELS}.mamba.triton_ops.ssd_combined", "untuned", f"{_KERNELS}.mamba.triton_ops"),
    (
        f"{_KERNELS}.mamba.mamba_state_scatter_triton",
        "any_device",
        "fused_mamba_state_scatter_with_mask,fused_conv_window_scatter_with_mask",
    ),
    ("sglang.srt.models.nemotron_h", "squared_experts", "NemotronHMoE"),
    ("sglang.srt.models.nemotron_h", "wide_product", "mm"),
)
_NO_XPU = (f"{_SPEC}.eagle_utils", "flag", "_is_xpu=none")


def _v2_only(
    first: str,
    attention: tuple[Patch, ...],
    *patches: Patch,
    sampled_in: str = "",
    dp_patches: tuple[Patch, ...] = _DP_OLD,
    old_mtp: bool = False,
) -> Release:
    """A row of releases that have the v2 worker alone. sampled_in: the module of `eagle_sample`, from 0.5.14 on.

    old_mtp: the multi-layer worker before 0.5.16.
    """
    row = replace(
        _V2_ONLY,
        first=first,
        patches=(_LLAMA, _GPT_OSS, *attention, *patches),
        dp_patches=dp_patches,
        mtp_patches=_MTP_CUDA if old_mtp else (),
        mtp_plan_patches=_MTP_PLAN if old_mtp else (),
    )
    if not sampled_in:
        return row
    return replace(row, sample=(f"{_SPEC}.{sampled_in}", "eagle_sample"), greedy=f"{_SPEC}.eagle_utils")


#: Newest first; a release belongs to the first row whose `first` is not newer than it.
RELEASES: tuple[Release, ...] = (
    _v2_only(
        "0.5.23",
        _ATTENTION_NEW,
        (f"{_KERNELS}.speculative.spec_tree", "flag", "_is_xpu=none"),
        (f"{_SPEC}.eagle_utils", "sampling", ""),
        _LOCS_NEW,
        (f"{_KERNELS}.sampling.murmur_hash", "murmur", ""),
        *_RECURRENT,
        sampled_in="eagle_worker_common",
        dp_patches=_DP_0_5_23,
    ),
    _v2_only(
        "0.5.16",
        _ATTENTION_NEW,
        _NO_XPU,
        (f"{_SPEC}.eagle_utils", "sampled_path", "_is_xpu"),
        ("sgl_kernel", "sampling", ""),
        _LOCS_NEW,
        *_RECURRENT,
        ("sglang.srt.mem_cache.memory_pool", "device_name", "zeros"),  # what a verify keeps of recurrent states
        sampled_in="eagle_worker_common",
    ),
    _v2_only("0.5.15", _ATTENTION_OLD, _NO_XPU, _LOCS_OLD, sampled_in="eagle_worker_v2", old_mtp=True),
    _v2_only("0.5.14", _ATTENTION_OLD, *_OWN_TREE, _LOCS_OLD, sampled_in="eagle_worker_v2", old_mtp=True),
    _v2_only("0.5.13", _ATTENTION_OLD, *_OWN_TREE, _LOCS_OLD, (f"{_SPEC}.eagle_info_v2", "sampling", ""), old_mtp=True),
    _V2,
    _V1,
)


def lookup(version: str, *, overlap: bool) -> Release:
    """The hook table of `version`; LookupError for releases older than the oldest row."""
    wanted = parse(version)
    for release in RELEASES:
        if wanted >= parse(release.first) and release.overlap in (None, overlap):
            return release
    raise LookupError(f"SGLang {version} is older than {RELEASES[-1].first}, the oldest release with a hook table")


def multi_layer(release: Release) -> Release:
    """`release` with the multi-layer worker as its worker; LookupError where only the v1 scheduling was asked for."""
    if release.generation == "v1":
        raise LookupError("the v1 multi-layer worker has no hook table; leave overlap at the release's default")
    sample = release.sample
    if sample is not None and sample[0] == release.worker_module:  # each worker imports the name for itself
        sample = (_MTP_WORKER, sample[1])
    return replace(
        release,
        sample=sample,
        worker_module=_MTP_WORKER,
        worker="MultiLayerEagleWorkerV2",
        draft="MultiLayerEagleDraftWorker",
        patches=(*release.patches, *release.mtp_patches),
        plan_patches=release.mtp_plan_patches,
        layered=True,
    )


def default_overlap(version: str, *, topk: int, device: str) -> bool:
    """The scheduling a user of `version` gets without asking.

    On a CPU, 0.5.13 and later run without overlap (0.5.17 and later force it off there); before, the default worker of
    a chain (topk = 1) needs it, and trees force it off.
    """
    if parse(version) >= parse("0.5.13"):
        return device != "cpu"
    return topk == 1
