"""Names of SGLang's that differ between releases, and what is read by them.

Engine side: standard library, torch and SGLang only. It must not wrap anything.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ...both_sides.compat import Release
from .recorder import plain_rid
from .snapshot import Copy, Tensors

#: What a chain's draft step ends with where `select_top_k_tokens` is not asked.
CHAIN_CHOOSER = "draft_topk1_postprocess"
#: What a round without draft steps verifies; only where their number changes.
TRIVIAL_VERIFY = "_build_trivial_verify_input"
#: What walks a tree, or a chain, by uniforms; only a batch with a sampled request asks for one.
SAMPLED_WALKS = ("tree_speculative_sampling_target_only", "chain_speculative_sampling_triton")
#: Where releases from 0.5.15 to 0.5.22 or so look them up at each call, instead of importing them by name.
WALKS_AT_CALL = ("sgl_kernel", "sglang.kernels.ops.speculative.reject_sampling")
#: The module of what a batch samples by.
SAMPLING = "sglang.srt.sampling.sampling_batch_info"
#: What copies the unfinished last page of a prefix to where branches begin; only with pages and topk > 1.
TAIL_COPIER = "duplicate_prefix_tail_to_draft_branches"
#: Of a model runner: copies states that prompts go on from into the slots of their requests.
STATES_COPIED = "_maybe_execute_deferred_mamba_cow_and_clear"
# Names that changed between releases, newest last; the first one present is read.
PREFIX_LENS = ("prefix_lens", "extend_prefix_lens")
EXTEND_LENS = ("extend_lens", "extend_seq_lens")
ACCEPTED_DRAFTS = ("num_accepted_drafts_per_req_cpu", "num_correct_drafts_per_req_cpu")
ACCEPTED_INDICES = ("accepted_indices", "accept_indices")
ACCEPTED_TOKENS = ("verified_id", "accept_tokens")


def sampled_walks(release: Release) -> list[tuple[types.ModuleType, str]]:
    """(module, name) of every place from which a verify may take what walks by uniforms."""
    places = [sys.modules[release.greedy]]
    for name in WALKS_AT_CALL:
        with suppress(ImportError):  # not in this release, or only a stub on a CPU
            places.append(importlib.import_module(name))
    return [(place, walk) for place in places for walk in SAMPLED_WALKS if vars(place).get(walk) is not None]


def first_of(owner: Any, names: tuple[str, ...]) -> Any:
    """The first of `names` that `owner` has; AttributeError naming them all if there is none."""
    for name in names:
        value = getattr(owner, name, None)
        if value is not None:
            return value
    raise AttributeError(f"{type(owner).__name__} has none of {', '.join(names)}")


def as_tensor(values: Any) -> torch.Tensor:
    """Whole numbers that some releases hold as a list."""
    return values if isinstance(values, torch.Tensor) else torch.as_tensor(values, dtype=torch.int64)


def free_lists(allocator: Any) -> list[torch.Tensor]:
    """Of an allocator of pages: those that nobody has, [*] each; none where it keeps no lists."""
    lists = (getattr(allocator, name, None) for name in ("free_pages", "release_pages"))
    return [pages for pages in lists if pages is not None]


def read_batch(batch: Any, copied: Callable[[Tensors], Copy | None]) -> dict[str, Any]:
    """What `Recorder.open_round` takes of a ScheduleBatch or ModelWorkerBatch (see trace.RoundRecord)."""
    mode = batch.forward_mode
    reqs = list(batch.reqs or [])
    if mode.is_idle() or not reqs:
        return {"mode": "IDLE", "rids": [], "starts": []}
    rids = [plain_rid(req.rid) for req in reqs]
    if not mode.is_extend():
        before = copied({"starts": batch.seq_lens})  # under overlap scheduling the device is still working on them
        return {"mode": "DECODE", "rids": rids, "starts": before}
    starts = list(first_of(batch, PREFIX_LENS))
    lens = list(first_of(batch, EXTEND_LENS))
    ends = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
    final = [start + length >= end for start, length, end in zip(starts, lens, ends, strict=True)]
    decoding = [plain_rid(req.rid) for req in batch.decoding_reqs or ()] if mode.is_mixed() else []
    return {"mode": "PREFILL", "rids": rids, "starts": starts, "lens": lens, "final": final, "decoding": decoding}
