"""Which experts routers choose where scores nearly tie: measured over two replays, and turned around in a third.

A replay asks its routers the same rows in the same order whatever it computes in, since it is conditioned on what an
engine did. So the float32 run says which experts nearly changed places (`Edge`): the last one chosen and the first one
left out, or, where three scores nearly tie, the last but one or the second left out. The run in the engine's dtype says
how far rounding moves the margin between two (`Measured`), and a third run takes the other expert wherever the margin
is within that (`TurnedTies`): the same model, as right as the first. This module must not judge, and must not know what
a row means.

Shapes: T rows of one call, E experts, k chosen ones, X exchanges, the nearest first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

#: How many times as far as the second run's an engine's scores may be off, since it rounds in other places.
ALLOWANCE = 1.5
#: A tie is within four standard deviations of that. The nearest are tried first, alone: where all are turned, the rows
#: that another row sees went elsewhere too, though an engine seldom turns more than the nearest.
DEVIATIONS = (1.0, 2.0, 4.0)
#: Which experts change places: that many before the last one chosen, and that many behind the first one left out.
EXCHANGES = ((0, 0), (1, 0), (0, 1))
#: Median of |x| of a standard normal x: one row that went elsewhere before says nothing of how scores are rounded.
MEDIAN = 0.6745


class Watch(Protocol):
    """Whoever is asked before a router's choice counts."""

    def choose(self, router: object, values: Tensor, chosen: Tensor) -> Tensor:
        """values [T,E] that decide, chosen int64 [T,k], best first -> the experts that rows go to, [T,k]."""


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def settled(router: object, values: Tensor, chosen: Tensor) -> Tensor:
    """What whoever watches makes of a choice (see Watch)."""
    watch = _watch.get()
    return chosen if watch is None or chosen.shape[1] == values.shape[1] else watch.choose(router, values, chosen)


@contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """Routers of this thread ask `watch`, or nobody."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One call: experts that leave and come, int64 [T,X], in each exchange that there is; margin [T,X] between."""

    router: object
    leaving: Tensor
    coming: Tensor
    margin: Tensor


@dataclass(slots=True)
class Recorded:
    """The edges of all calls, in order."""

    edges: list[Edge] = field(default_factory=list)

    def choose(self, router: object, values: Tensor, chosen: Tensor) -> Tensor:
        """See Watch."""
        inside, outside = chosen.shape[1], values.shape[1] - chosen.shape[1]
        left_out = values.scatter(-1, chosen, float("-inf")).topk(min(2, outside)).indices
        places = [(leaves, comes) for leaves, comes in EXCHANGES if leaves < inside and comes < outside]
        leaving = torch.stack([chosen[:, -1 - leaves] for leaves, _ in places], dim=-1)
        coming = torch.stack([left_out[:, comes] for _, comes in places], dim=-1)
        margin = _between(values, leaving, coming)
        self.edges.append(Edge(router=router, leaving=leaving, coming=coming, margin=margin))
        return chosen

    def routers(self) -> list[object]:
        """Each router once, in the order of their first calls."""
        return list({id(edge.router): edge.router for edge in self.edges}.values())


@dataclass(slots=True)
class Measured:
    """Errors of the nearest exchange's margins in another run over the same calls, [T] each."""

    recorded: Recorded
    errors: list[Tensor] = field(default_factory=list)

    def choose(self, router: object, values: Tensor, chosen: Tensor) -> Tensor:
        """See Watch."""
        place = len(self.errors)
        known = place < len(self.recorded.edges) and len(self.recorded.edges[place].margin) == len(values)
        edge = self.recorded.edges[place] if known else None
        missing = torch.full((len(values),), float("nan"), device=values.device)
        self.errors.append(
            missing if edge is None else (_between(values, edge.leaving, edge.coming) - edge.margin)[:, 0]
        )
        return chosen

    def deviations(self) -> dict[int, float]:
        """id of a router -> the standard deviation of its margins' errors; none where the calls are others."""
        if len(self.errors) != len(self.recorded.edges):
            return {}
        found = dict[int, list[Tensor]]()
        for edge, error in zip(self.recorded.edges, self.errors, strict=True):
            found.setdefault(id(edge.router), []).append(error.abs())
        pooled = {router: float(torch.cat(errors).nanmedian()) / MEDIAN for router, errors in found.items()}
        return {router: deviation for router, deviation in pooled.items() if math.isfinite(deviation)}

    def usual(self) -> float:
        """How many choices of the recorded calls rounding turns around, as expected."""
        deviations, total = self.deviations(), 0.0
        for edge in self.recorded.edges:
            if deviation := ALLOWANCE * deviations.get(id(edge.router), 0.0):
                total += float(torch.special.erfc(edge.margin / deviation / math.sqrt(2)).sum()) / 2
        return total


@dataclass(slots=True)
class TurnedTies:
    """Takes the other expert at every tie of `routers` within so many standard deviations. exchange: of EXCHANGES."""

    recorded: Recorded
    deviations: Mapping[int, float]
    routers: Collection[int]
    within: float = DEVIATIONS[-1]
    exchange: int = 0
    _call: int = 0

    def _ties(self, edge: Edge) -> Tensor:
        """bool [T]: the rows of a call whose tie is turned around."""
        near = ALLOWANCE * self.within * self.deviations.get(id(edge.router), 0.0)
        return edge.margin[:, self.exchange] < near

    def _asked(self, edge: Edge) -> bool:
        return id(edge.router) in self.routers and self.exchange < edge.margin.shape[1]

    def ties(self) -> frozenset[tuple[int, int]]:
        """Those rows, as (call, row)."""
        calls = enumerate(self.recorded.edges)
        rows = ((call, self._ties(edge).nonzero()[:, 0].tolist()) for call, edge in calls if self._asked(edge))
        return frozenset((call, row) for call, own in rows for row in own)

    def choose(self, router: object, values: Tensor, chosen: Tensor) -> Tensor:
        """See Watch."""
        edges, place = self.recorded.edges, self._call
        self._call += 1
        edge = edges[place] if place < len(edges) else None
        if edge is None or edge.router is not router or len(edge.margin) != len(values) or not self._asked(edge):
            return chosen
        leaving, coming = edge.leaving[:, self.exchange, None], edge.coming[:, self.exchange, None]
        turned = self._ties(edge)[:, None] & (chosen == leaving) & ~(chosen == coming).any(-1, keepdim=True)
        return torch.where(turned, coming, chosen)


def turned_ties(recorded: Recorded, deviations: Mapping[int, float], most: int) -> Iterator[TurnedTies]:
    """Which ties are turned around together, the nearest first: of each router alone, or `most` runs of them where they
    are more; and of all. None twice. Of the other exchanges, which few rows have, all at once."""
    ids, tried = [id(one) for one in recorded.routers()], set[tuple[int, frozenset[tuple[int, int]]]]()
    step = -(-len(ids) // most)
    groups = [*(ids[start : start + step] for start in range(0, len(ids), step)), ids]
    steps = [(0, within) for within in DEVIATIONS] + [(other, DEVIATIONS[-1]) for other in range(1, len(EXCHANGES))]
    for exchange, within in steps:
        for routers in map(set, groups):
            one = TurnedTies(
                recorded=recorded, deviations=deviations, routers=routers, within=within, exchange=exchange
            )
            ties = one.ties()
            if ties and (exchange, ties) not in tried:
                tried.add((exchange, ties))
                yield one


def _between(values: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return values.gather(-1, one) - values.gather(-1, other)
