"""Tree building and greedy tree verification in plain torch, for releases whose kernels have no CPU build.

Engine side: torch only. Ours, written from what the tensors mean (EAGLE-2, arXiv 2406.16858): where these run, tree
and verify kernels are *not* the release's own, and the trace header says so.
"""

from __future__ import annotations

from typing import Any

import torch


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = 0,
) -> None:
    """Fill mask, positions and child/sibling links in place.

    parent_list [b, 1 + t·(k-1)]: candidate index a group of t children grew from (-1: the root). selected_index
    [b, n-1]: the kept candidates, ascending. positions [b·n], retrieve_* [b, n]. Only full masks are supported.
    """
    if int(tree_mask_mode) != 0:
        raise NotImplementedError(
            f"the CPU replacement of tree building makes full masks only, not mode {tree_mask_mode}"
        )
    n = draft_token_num
    offset = 0
    for b, committed in enumerate(seq_lens.tolist()):
        parents = _parents(parent_list[b].tolist(), selected_index[b].tolist(), topk)
        width = committed + n
        block = tree_mask[offset : offset + n * width].view(n, width)
        offset += n * width
        tree = block[:, committed:]
        tree.fill_(False)
        for node, parent in enumerate(parents):
            tree[node, node] = True
            position = committed
            if parent >= 0:
                tree[node] |= tree[parent]
                position = int(positions[b * n + parent]) + 1
            positions[b * n + node] = position
            retrieve_index[b, node] = b * n + node
        _link(parents, retrieve_next_token[b], retrieve_next_sibling[b])


def _parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """Parent node of every node, the root (node 0) first with -1."""
    node_of = {candidate: node + 1 for node, candidate in enumerate(selected)}
    parents = [-1]
    for candidate in selected:
        group = candidate // topk
        parents.append(0 if group == 0 else node_of[parent_list[group]])
    return parents


def _link(parents: list[int], next_token: torch.Tensor, next_sibling: torch.Tensor) -> None:
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        next_sibling[node] = next_token[parent]
        next_token[parent] = node


def verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree along the target's choices; same in/out tensors as SGLang's function of this name.

    accept_token_num counts accepted drafts without the bonus; accept_index [b, k+1] holds flat node indices.
    """
    for b in range(candidates.shape[0]):
        node, accepted = 0, 0
        accept_index[b, 0] = retrieve_index[b, 0]
        while True:
            choice = int(target_predict[b, node])
            predicts[int(retrieve_index[b, node])] = choice
            child = int(retrieve_next_token[b, node])
            while child != -1 and int(candidates[b, child]) != choice:
                child = int(retrieve_next_sibling[b, child])
            if child == -1 or accepted + 1 >= accept_index.shape[1]:
                break
            accepted += 1
            accept_index[b, accepted] = retrieve_index[b, child]
            node = child
        accept_token_num[b] = accepted
    return predicts, accept_index, accept_token_num
