"""Selects the rows of a forward that count, and summarises their logits. Arrays in, arrays out.

Control side: NumPy only. It must not know what a message is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.both_sides.projections import TOP_LOGITS
from harness.both_sides.wire import Arrays


class Misfit(ValueError):
    """What an engine reported of a batch contradicts that batch, so that nobody can say which rows it is of."""


def without_front(array: np.ndarray, requests: int, again: int) -> np.ndarray:
    """Blocks of equal width, one a request, each without its first `again` rows; one row a request stays as it is."""
    width = len(array) // requests
    if width <= again:
        return array
    return array.reshape(requests, width, *array.shape[1:])[:, again:].reshape(-1, *array.shape[1:])


def of_rows(found: Arrays, names: Sequence[str], rows: np.ndarray) -> Arrays:
    """Those of these arrays that are there, in these rows; rows that are all there are stay where they are."""
    held = {name: found[name] for name in names if name in found}
    there = len(next(iter(held.values())))
    if len(rows) == there:
        return held
    if rows.max() >= there:
        raise Misfit(f"{there} rows of {' '.join(held)}, and row {rows.max()} is one that counts")
    return {name: array[rows] for name, array in held.items()}


def summary_reported(found: Arrays) -> Arrays:
    """What the device worked out of logits."""
    return {
        "top_logits": found["top_logits"],
        "lse": _log_sum_exp(found),
        "top_ids": best_first(found["top_ids"], found["best"]),
    }


def summary_of(logits: np.ndarray) -> Arrays:
    """Of float32 [r, v]: the 16 greatest, the first of equal ones first, their ids, and the log-sum-exp [r].

    A NaN counts as the greatest, as for SGLang's argmax.
    """
    count = min(TOP_LOGITS, logits.shape[1])
    sure = np.where(np.isnan(logits), np.inf, logits)
    some = np.argpartition(-sure, count - 1, axis=1)[:, :count] if count < logits.shape[1] else None
    some = np.broadcast_to(np.arange(count), (len(logits), count)) if some is None else np.sort(some, axis=1)
    order = np.argsort(-np.take_along_axis(sure, some, axis=1), axis=1, kind="stable")
    ids = np.take_along_axis(some, order, axis=1)
    best = sure.argmax(axis=1)  # of many equal ones, the first may be among those that were left out
    top = np.take_along_axis(logits, ids, axis=1)
    greatest = sure.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        lse = np.log(np.exp(logits - greatest).sum(axis=1, dtype=np.float64)) + greatest[:, 0]
    return {"top_logits": top, "top_ids": best_first(ids, best), "lse": lse.astype(np.float32)}


def _log_sum_exp(found: Arrays) -> np.ndarray:
    """float32 [r]: as reported, or the logit of any token less its log-probability."""
    if "lse" in found:
        return found["lse"].reshape(-1)
    first = found["top_logits"][:, 0].astype(np.float64)
    return (first - found["log_prob"].reshape(-1)).astype(np.float32)


def best_first(top_ids: np.ndarray, best: np.ndarray) -> np.ndarray:
    """top_ids [r, 16] with the argmax best [r] in front, where equal logits let another id stand there."""
    others_first = top_ids[:, 0] != best
    if not others_first.any():
        return top_ids
    ordered = top_ids.copy()
    for row in np.flatnonzero(others_first):
        others = top_ids[row][top_ids[row] != best[row]]
        ordered[row] = np.concatenate([best[row : row + 1], others])[: top_ids.shape[1]]
    return ordered


def without_padding(array: np.ndarray, *, batch: int, requests: int, packed: int) -> np.ndarray:
    """The rows of `array` that belong to the `requests` real ones of a graph captured for `batch`.

    packed: how many rows they have where rows of different requests follow each other without gaps (the draft extend of
    the v1 worker); 0 where each request has a block of its own.
    """
    if packed and len(array) > batch:
        return array[:packed]
    return array[: requests * (len(array) // batch)]


def kept_rows(lens: np.ndarray, rows: int, requests: int) -> np.ndarray:
    """Row numbers of a forward that belong to accepted tokens: a block of equal width a request, or packed rows."""
    if lens.sum() == rows:
        return np.arange(rows)
    width = rows // requests
    return np.concatenate([np.arange(i * width, i * width + length) for i, length in enumerate(lens.tolist())])


def output_rows(phase: str, lens: np.ndarray, keep: np.ndarray, produced: int) -> tuple[np.ndarray, np.ndarray]:
    """Which kept rows an output tensor of `produced` rows speaks of, and which of its rows to read for them.

    Draft-extend outputs matter only at each request's last committed row; one row a request means "last row".
    """
    if produced == 0:
        return np.arange(0), np.arange(0)
    ends = np.cumsum(lens) - 1
    if produced == len(lens) and produced != len(keep):
        return ends, np.arange(produced)
    if phase == "EXTEND":
        return ends, ends if produced == len(keep) else keep[ends]
    return np.arange(len(keep)), keep


def parents_of(next_token: np.ndarray, next_sibling: np.ndarray, width: int) -> np.ndarray:
    """Child and sibling links [b·n] -> parent of every node [b, n], -1 for the root and for unlinked nodes.

    Misfit for links that leave the tree, or go round in a circle.
    """
    children = next_token.reshape(-1, width).tolist()
    siblings = next_sibling.reshape(-1, width).tolist()
    parents = [[-1] * width for _ in children]
    for own, first, further in zip(parents, children, siblings, strict=True):
        left = width * width  # a node has at most all others for children
        for node, child in enumerate(first):
            while child != -1:
                if not 0 <= child < width or not left:
                    raise Misfit(f"children {first} and siblings {further} are no tree of {width} nodes")
                own[child], left = node, left - 1
                child = further[child]
    return np.asarray(parents, dtype=np.int64).reshape(-1, width)
