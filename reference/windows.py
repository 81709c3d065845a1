"""Inputs and outputs of each multi-token prediction layer at every row of a request, given when the rows ran.

Source: DeepSeek-V3 (arXiv 2412.19437) section 2.2: the layer of depth i reads, at position j, the token j+1+i. (Depths
count from 0 here.) When rows start..stop-1 run, the text may not reach as far as a deep layer reads. Token stop+1+m is
then what layer m has just proposed from row stop-1, and the row is not run again when the text becomes another. So
what a layer should have read at a row depends on when the row ran, which is what `Window` says.

`Reads` is an extension point (see reference.departures). This module must not look at a trace.

Shapes: T tokens, R rows, h hidden width, k layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.mtp import MtpHead, MtpLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows start..stop-1, which ran together. known: tokens of the text that existed then.

    proposals: what somebody else's layers proposed from the last row, None where the reference's own counts.
    again: how many rows before `start` each layer ran once more, now that more of the text was known; () is none.
    """

    start: int
    stop: int
    known: int
    proposals: tuple[int | None, ...] = ()
    again: tuple[int, ...] = ()

    def first(self, i: int) -> int:
        """The first row that layer i ran."""
        return max(0, self.start - (self.again[i] if i < len(self.again) else 0))


class Reads:
    """What the layers read, as the paper has it."""

    def token(self, text: Sequence[int], window: Window, at: int) -> int:
        """The token that a row of `window` takes for the one at index `at`; the proposals it needs are filled."""
        if at < window.known:
            return text[at]
        proposed = window.proposals[at - window.stop - 1]
        assert proposed is not None
        return proposed

    def before(self, text: Sequence[int], window: Window, i: int) -> Sequence[int]:
        """What layer i had read at rows 0.. before the window; () where it is what this request's own layer read."""
        return ()

    def states_again(self, window: Window, states: Tensor) -> Tensor:
        """The states [m,h] that the m rows before `window` read when they run once more: the target's own."""
        return states


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """One layer over a request's rows [R]: tokens int64 [R] read, hidden [R,h] read, g [R,h] said."""

    tokens: Tensor
    hidden: Tensor
    g: Tensor


def read_depths(
    head: MtpHead, text: Sequence[int], hidden: Tensor, windows: Sequence[Window], k: int, reads: Reads | None = None
) -> tuple[list[Depth], list[Window]]:
    """k layers over the rows that `windows` ran, in order and without gaps, and the windows with all proposals filled.

    text: T tokens. hidden [>=R,h]: the target's states. Rows before the first window (cached from elsewhere) count as
    run when their window's text was known.
    """
    if not windows:
        return [], []
    if head.chained and any(window.again for window in windows):
        raise ValueError("layers that read each other's output and run rows again are not built here")
    rows, reads = windows[-1].stop, reads or Reads()
    positions, state = torch.arange(rows, device=hidden.device), hidden[:rows]
    depths, filled = list[Depth](), list(windows)
    for i in range(k):
        layer = head.layers[i]
        fed = torch.tensor(_fed(text, filled, i, reads), device=hidden.device)
        if any(window.again or len(reads.before(text, window, i)) for window in filled):
            g = _as_they_ran(layer, text, state, filled, i, reads)
        else:
            g, _ = layer.forward(fed, state, positions)
        depths.append(Depth(tokens=fed, hidden=state, g=g))
        best = layer.logits(g[[window.stop - 1 for window in filled]]).argmax(-1).tolist()
        filled = [_fill(window, i, own) for window, own in zip(filled, best, strict=True)]
        state = g if head.chained else state
    return depths, filled


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """What a request's rows hold in one layer once a window has run there: tokens [stop], states [stop,h].

    first: the first row that the layer ran for this window; start: the window's own first.
    """

    tokens: list[int]
    states: Tensor
    first: int
    start: int


def cached_rows(
    text: Sequence[int], hidden: Tensor, windows: Sequence[Window], i: int, reads: Reads
) -> Iterator[Cached]:
    """Window by window, what layer i's rows hold; hidden [R,h]: the target's states. Proposals must be filled.

    What a row holds (its key and value) depends on its token and state alone, so it is enough to keep those.
    """
    tokens, states = [0] * len(hidden), hidden.clone()
    for number, window in enumerate(windows):
        start, stop, before = window.start if number else 0, window.stop, reads.before(text, window, i)
        first = window.first(i) if number else len(before)
        tokens[: len(before)] = before
        tokens[first:stop] = [reads.token(text, window, row + 1 + i) for row in range(first, stop)]
        states[first:stop] = hidden[first:stop]
        if first < start:
            states[first:start] = reads.states_again(window, hidden[first:start])
        yield Cached(tokens=tokens[:stop], states=states[:stop].clone(), first=first, start=start)


def _as_they_ran(
    layer: MtpLayer, text: Sequence[int], hidden: Tensor, windows: Sequence[Window], i: int, reads: Reads
) -> Tensor:
    """g [R,h] of layer i, each row by what the rows before it held when its window ran. hidden [R,h]."""
    said = list[Tensor]()
    for held in cached_rows(text, hidden, windows, i, reads):
        tokens = torch.tensor(held.tokens, device=hidden.device)
        g, _ = layer.forward(tokens, held.states, torch.arange(len(tokens), device=hidden.device))
        said.append(g[held.start :])
    return torch.cat(said)


def _fed(text: Sequence[int], windows: Sequence[Window], i: int, reads: Reads) -> list[int]:
    """The token that layer i reads at every row; layers before it have their proposals filled."""
    return [
        reads.token(text, window, row + 1 + i)
        for number, window in enumerate(windows)
        for row in range(window.start if number else 0, window.stop)
    ]


def _fill(window: Window, i: int, own: int) -> Window:
    """`window` with a proposal of layer i."""
    given = window.proposals[i] if i < len(window.proposals) else None
    filled = own if given is None else given
    return replace(window, proposals=(*window.proposals[:i], filled, *window.proposals[i + 1 :]))
