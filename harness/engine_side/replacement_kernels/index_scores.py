"""Scores of a sparse attention indexer in plain torch, where DeepGEMM is not there or has nothing to compile.

Engine side: torch only. Ours, written from DeepSeek-V3.2's report (arXiv 2512.02556, section 2.1): a key's score is the
sum over index heads of a weight times relu(q · k). Keys and queries in FP8, their scales and the choice of the best
stay SGLang's. It stands in where DeepGEMM's package would be imported.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PACKAGE = "deep_gemm"
#: Where CUDA is that nothing names.
CUDA = "/usr/local/cuda"


class IndexScores:
    """Of one process: a package of that name, if there is none that is whole; `describe` for the trace header."""

    def __init__(self) -> None:
        self.absent = not _whole()
        if self.absent:
            made = types.ModuleType(PACKAGE)
            made.__spec__ = importlib.machinery.ModuleSpec(PACKAGE, None)  # whoever looks for it finds it
            made.__dict__.update({function.__name__: function for function in FUNCTIONS})
            sys.modules[PACKAGE] = made

    def describe(self) -> list[dict[str, str]]:
        """See cpu_ops.Replacement."""
        names = ("fp8_mqa_logits", "fp8_paged_mqa_logits") if self.absent else ()
        why = "DeepGEMM is not here, or without its headers or a compiler"
        return [
            {"operation": f"{PACKAGE}.{one}", "by": "stand-in", "subject": "index scores", "reason": why}
            for one in names
        ]


def _whole() -> bool:
    """Whether it is here with the headers of what it compiles at first use, and a compiler where it looks for one."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None or not (Path(found.origin).parent / "include").is_dir():
        return False
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), CUDA)
    return bool(shutil.which("nvcc")) or any(Path(home, "bin", "nvcc").is_file() for home in homes if home)


def get_num_sms() -> int:
    """Only sizes a plan that nobody reads here."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def set_num_sms(_number: int) -> None:
    """Nothing to divide."""


def get_paged_mqa_logits_metadata(lengths: torch.Tensor, _block: int, processors: int) -> torch.Tensor:
    """A plan that nobody reads here."""
    return torch.zeros(processors + 1, 2, dtype=torch.int32, device=lengths.device)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    **_kwargs: Any,
) -> torch.Tensor:
    """q [m,H,d], k [n,d] and its scales [n], weights [m,H] -> [m,n]; row i may choose keys starts[i] to ends[i]."""
    keys, scales = kv
    scores = _scores(q, keys, scales.reshape(-1), weights)
    places, out = torch.arange(len(keys), device=q.device), _unseen(len(q), len(keys), q.device)
    out.copy_(scores.masked_fill((places < starts[:, None]) | (places >= ends[:, None]), float("-inf")))
    return out


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    _plan: torch.Tensor,
    longest: int,
    **_kwargs: Any,
) -> torch.Tensor:
    """q [B,n,H,d], weights [B*n,H], lengths [B,n] or [B,1], table [B,pages] -> [B*n,longest].

    cache: uint8 [pages,size,1,d+4]: of each page first all keys, then all scales. Nothing waits for the host, so that
    it can be captured.
    """
    batch, each, heads, width = q.shape
    pages, size = cache.shape[:2]
    flat = cache.reshape(pages, -1)
    keys = flat[:, : size * width].view(torch.float8_e4m3fn).reshape(pages, size, width)
    scales = flat[:, size * width :].contiguous().view(torch.float32).reshape(pages, size)
    used = table.clamp(0, pages - 1).long()  # behind a request's own pages a graph's table holds anything
    named, sized = keys.view(torch.uint8)[used].reshape(batch, -1, width), scales[used].reshape(batch, 1, -1)
    products = torch.einsum("bnhd,bkd->bnhk", q.float(), named.view(torch.float8_e4m3fn).float()).relu()
    scores = (products * weights.float().reshape(batch, each, heads, 1)).sum(dim=2) * sized  # [B,n,K]
    known = lengths.reshape(batch, -1, 1).expand(-1, each, -1)
    scores = scores.masked_fill(torch.arange(scores.shape[-1], device=q.device) >= known, float("-inf"))
    out = _unseen(batch * each, longest, q.device)
    most = min(longest, scores.shape[-1])
    out[:, :most] = scores.reshape(batch * each, -1)[:, :most]
    return out


def _unseen(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """[rows,columns] that nobody sees; rows begin at multiples of 64, since who chooses reads four at a time."""
    return torch.full((rows, -(-columns // 64) * 64), float("-inf"), device=device)[:, :columns]


def _scores(q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    products = torch.einsum("mhd,nd->mhn", q.float(), keys.float()).relu()
    return (products * weights.float()[:, :, None]).sum(dim=1) * scales.float()


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(get_num_sms, set_num_sms, get_paged_mqa_logits_metadata),
    *(fp8_mqa_logits, fp8_paged_mqa_logits),
)
