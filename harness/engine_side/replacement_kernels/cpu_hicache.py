"""Replacement kernels of the host cache: rows copied between a device's KV buffers and the host's, with plain indexing.

Engine side: torch only. Which rows, which layers and which pools is SGLang's decision; nothing here may choose any.
The names and arguments are those of `sgl_kernel.kvcacheio`, for `hicache_io_backend` "direct". A CPU has no streams, so
a copy is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def transfer_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Rows of some layers, [slots, heads, head_dim] each, to other slots of as many layers."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def load_layer_of_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer's rows from host pages, [pages, layers, page_size, heads, head_dim] each, to a layer of the device."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def store_layers_in_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers' rows to host pages, the opposite of `load_layer_of_pages`; of K and V all layers of K come first."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        part, layer = divmod(i, layers)
        dst_ptrs[part][dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]
