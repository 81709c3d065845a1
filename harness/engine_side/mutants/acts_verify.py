"""Acts on a verify: the draft tree, its mask, the walk that accepts, and what decides a sampled one.

Engine side: torch only. Flat node numbers are request · n + node, as in SGLang.

Symbols: b requests, n nodes, t candidates a step, V tokens.
"""

from __future__ import annotations

import torch

from .registry import Context, Values, act


@act
def swap_parents(context: Context, values: Values) -> Values:
    """Children of candidate 0 hang under candidate 1 and the other way round, where both were kept.

    parents [b, groups]: entry g is the candidate that group g (t candidates) grew from; groups 1 and 2 are the
    children of the first two candidates.
    """
    parents, selected = values["parents"].clone(), values["selected"]
    both = (selected == 0).any(dim=1) & (selected == 1).any(dim=1)
    parents[both, 1], parents[both, 2] = parents[both, 2], parents[both, 1]
    return {"parents": parents}


@act
def swap_tokens(context: Context, values: Values) -> Values:
    tokens = values["tokens"].clone()
    tokens[:, -1], tokens[:, -2] = values["tokens"][:, -2], values["tokens"][:, -1]
    return {"tokens": tokens}


@act
def lose_sibling(context: Context, values: Values) -> Values:
    siblings = values["next_sibling"].clone()
    for b in range(siblings.shape[0]):
        linked = (siblings[b] >= 0).nonzero().flatten()
        if len(linked):
            siblings[b, linked[0]] = -1
    return {"next_sibling": siblings}


@act
def mask_bit(context: Context, values: Values) -> Values:
    """One bit of the last node's row: its `column` (parent, root, stranger) becomes `value`.

    mask: row s of a request with committed length c holds c prefix columns, then n tree columns; requests back to back.
    """
    mask, n, offset = values["mask"].clone(), values["next_token"].shape[1], 0
    for b, share in enumerate(context.shares):
        above = _line(values["next_token"][b].tolist(), values["next_sibling"][b].tolist(), node=n - 1)
        column = _column(str(context.args["column"]), above, node=n - 1)
        width = share.start + n
        if column is not None:
            mask[offset + (n - 1) * width + share.start + column] = bool(context.args["value"])
        offset += n * width
    return {"mask": mask}


@act
def mask_narrow(context: Context, values: Values) -> Values:
    """Rows of the mask are written one column narrower than they are read; the mask ends in columns nobody sees."""
    mask, n, offset = values["mask"], values["next_token"].shape[1], 0
    rows = []
    for share in context.shares:
        width = share.start + n
        rows.append(mask[offset : offset + n * width].view(n, width)[:, 1:].reshape(-1))
        offset += n * width
    narrow = torch.cat(rows)
    return {"mask": torch.cat((narrow, torch.zeros(len(mask) - len(narrow), dtype=mask.dtype, device=mask.device)))}


def _line(next_token: list[int], next_sibling: list[int], *, node: int) -> list[int]:
    """Nodes above `node`, its parent first."""
    parent_of: dict[int, int] = {}
    for parent, child in enumerate(next_token):
        while child != -1:
            parent_of[child] = parent
            child = next_sibling[child]
    above = []
    while node in parent_of:
        node = parent_of[node]
        above.append(node)
    return above


def _column(which: str, above: list[int], *, node: int) -> int | None:
    """The tree column meant, None where the tree has none of that sort."""
    if not above:
        return None
    strangers = [other for other in range(1, node) if other not in above]
    return {"parent": above[0], "root": above[-1], "stranger": strangers[-1] if strangers else None}[which]


@act
def one_more(context: Context, values: Values) -> Values:
    """The first child of the last accepted node is accepted too, whatever the target chose."""
    return _walked(values, [int(drafts) + 1 for drafts in values["drafts"]])


@act
def one_less(context: Context, values: Values) -> Values:
    return _walked(values, [max(int(drafts) - 1, 0) for drafts in values["drafts"]])


@act
def neighbour_length(context: Context, values: Values) -> Values:
    return _walked(values, values["drafts"].roll(-1).tolist())


def _walked(values: Values, wanted: list[int]) -> Values:
    """Walks of the wanted lengths: cut, or gone on with first children as far as the tree goes."""
    predict, index, drafts = values["predict"].clone(), values["accept_index"].clone(), values["drafts"].clone()
    n = values["next_token"].shape[1]
    for b, length in enumerate(wanted):
        while drafts[b] < min(length, index.shape[1] - 1):
            child = int(values["next_token"][b, int(index[b, drafts[b]]) - b * n])
            if child < 0:
                break
            drafts[b] += 1
            index[b, drafts[b]] = b * n + child
            predict[b * n + child] = values["target"][b, child]
        index[b, max(length, 0) + 1 :] = -1
        drafts[b] = min(int(drafts[b]), length)
    return {"predict": predict, "accept_index": index, "drafts": drafts}


def _bonus_nodes(values: Values) -> list[int]:
    """The flat node each request's bonus token comes from."""
    return [int(values["accept_index"][b, int(drafts)]) for b, drafts in enumerate(values["drafts"])]


@act
def bonus_from_root(context: Context, values: Values) -> Values:
    predict = values["predict"].clone()
    for b, node in enumerate(_bonus_nodes(values)):
        predict[node] = values["target"][b, 0].to(predict.dtype)
    return {"predict": predict}


@act
def bonus_of_neighbour(context: Context, values: Values) -> Values:
    predict = values["predict"].clone()
    nodes = _bonus_nodes(values)
    for node, other in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        predict[node] = values["predict"][other]
    return {"predict": predict}
