"""Which experts routers choose where scores nearly tie: measured over two replays, and turned around in a third.

A replay asks its routers the same rows in the same order whatever it computes in, since it is conditioned on what an
engine did. So the float32 run says which expert was the last one chosen and which the first one left out (`Edge`), the
run in the engine's dtype says how far rounding moves the margin between the two (`measured`), and a third run takes the
other expert wherever the margin is within that (`TurnedTies`): the same model, as right as the first. This module must
not judge, and must not know what a row means.

Shapes: T rows of one call, E experts, k chosen ones.
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
    """One call: last and first_out int64 [T], the last expert chosen and the first left out; margin [T] between."""

    router: object
    last: Tensor
    first_out: Tensor
    margin: Tensor


@dataclass(slots=True)
class Recorded:
    """The edges of all calls, in order."""

    edges: list[Edge] = field(default_factory=list)

    def choose(self, router: object, values: Tensor, chosen: Tensor) -> Tensor:
        """See Watch."""
        last = chosen[:, -1:]
        first_out = values.scatter(-1, chosen, float("-inf")).argmax(-1, keepdim=True)
        margin = _between(values, last, first_out)
        self.edges.append(Edge(router=router, last=last[:, 0], first_out=first_out[:, 0], margin=margin))
        return chosen

    def routers(self) -> list[object]:
        """Each router once, in the order of their first calls."""
        return list({id(edge.router): edge.router for edge in self.edges}.values())


@dataclass(slots=True)
class Measured:
    """Errors of the same margins in another run over the same calls."""

    recorded: Recorded
    errors: list[Tensor] = field(default_factory=list)

    def choose(self, router: object, values: Tensor, chosen: Tensor) -> Tensor:
        """See Watch."""
        place = len(self.errors)
        known = place < len(self.recorded.edges) and len(self.recorded.edges[place].margin) == len(values)
        edge = self.recorded.edges[place] if known else None
        missing = torch.full((len(values),), float("nan"), device=values.device)
        self.errors.append(
            missing if edge is None else _between(values, edge.last[:, None], edge.first_out[:, None]) - edge.margin
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
    """Takes the other expert at every tie of `routers` within so many standard deviations."""

    recorded: Recorded
    deviations: Mapping[int, float]
    routers: Collection[int]
    within: float = DEVIATIONS[-1]
    _call: int = 0

    def _ties(self, edge: Edge) -> Tensor:
        """bool [T]: the rows of a call whose tie is turned around."""
        taken = id(edge.router) in self.routers
        return edge.margin < taken * ALLOWANCE * self.within * self.deviations.get(id(edge.router), 0.0)

    def ties(self) -> frozenset[tuple[int, int]]:
        """Those rows, as (call, row)."""
        places = enumerate(self._ties(edge).nonzero()[:, 0].tolist() for edge in self.recorded.edges)
        return frozenset((call, row) for call, rows in places for row in rows)

    def choose(self, router: object, values: Tensor, chosen: Tensor) -> Tensor:
        """See Watch."""
        edges, place = self.recorded.edges, self._call
        self._call += 1
        if id(router) not in self.routers or place >= len(edges) or len(edges[place].margin) != len(values):
            return chosen
        edge = edges[place]
        turned = self._ties(edge)[:, None] & (chosen == edge.last[:, None])
        turned &= ~(chosen == edge.first_out[:, None]).any(-1, keepdim=True)
        return torch.where(turned, edge.first_out[:, None], chosen)


def turned_ties(recorded: Recorded, deviations: Mapping[int, float], most: int) -> Iterator[TurnedTies]:
    """Which ties are turned around together, the nearest first: of each router alone, or `most` runs of them where they
    are more; and of all. None twice."""
    ids, tried = [id(one) for one in recorded.routers()], {frozenset[tuple[int, int]]()}
    step = -(-len(ids) // most)
    groups = [*(ids[start : start + step] for start in range(0, len(ids), step)), ids]
    for within in DEVIATIONS:
        for routers in groups:
            one = TurnedTies(recorded=recorded, deviations=deviations, routers=set(routers), within=within)
            ties = one.ties()
            if ties not in tried:
                tried.add(ties)
                yield one


def _between(values: Tensor, one: Tensor, other: Tensor) -> Tensor:
    found: Tensor = (values.gather(-1, one) - values.gather(-1, other))[:, 0]
    return found
