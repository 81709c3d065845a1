"""Whether the copies of a prefix's last page, which branches of a paged tree begin with, hold what they copy.

Engine side: torch only. It must not change anything.

A branch draws whole pages. Where the committed length is not a multiple of the page, the first page of every branch but
the first begins with holes, and backends that read by page find the prefix's tail there only if it was copied.
"""

from __future__ import annotations

from typing import Any

import torch


def holes(
    rows: torch.Tensor, base: torch.Tensor, tail: torch.Tensor, pages: torch.Tensor, *, topk: int, page: int
) -> list[tuple[int, int, int]]:
    """(request, slot of the tail, slot of its copy) of every hole.

    rows [b, width]: slots by position. base, tail, pages [b]: where the prefix's last page begins, how much of it is
    the prefix's, and how many pages a branch has.
    """
    found = []
    for b, (start, length, each) in enumerate(zip(base.tolist(), tail.tolist(), pages.tolist(), strict=True)):
        for branch in range(1, topk):
            for offset in range(length):
                copy = start + branch * each * page + offset
                found.append((b, int(rows[b, start + offset]), int(rows[b, copy])))
    return found


def wrong_copies(pool: Any, found: list[tuple[int, int, int]]) -> list[int]:
    """The request of every hole whose keys or values in the pool's first layer are not the tail's."""
    if not found:
        return []
    layer = getattr(pool, "start_layer", None) or 0
    owners, sources, copies = zip(*found, strict=True)
    differ = torch.zeros(len(found), dtype=torch.bool)
    for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
        pair = (buffer[list(slots)].flatten(1).cpu() for slots in (sources, copies))
        differ |= (next(pair) != next(pair)).any(dim=1)
    return [owner for owner, wrong in zip(owners, differ.tolist(), strict=True) if wrong]
