"""What mutants change in the rows of a forward and in what is chosen from them.

An act is a function from the values at a site to those of them that become others; see also `fault_acts_tree` and
`fault_acts_pool`.

Engine side: standard library and torch only. A change must be made on copies; it must not know SGLang's classes, and
must not touch what the probe records: the engine computes on with what these return.

Symbols: b requests, k steps, t candidates a step, n nodes; rows of a request are found through `Scene.shares`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Share:
    """One request's rows in a forward: rows [first, first + rows)."""

    rid: str
    first: int
    rows: int
    start: int  # committed length of the request
    final: bool  # whether its prompt ends in this batch
    epoch: int  # times it had been retracted

    @property
    def last(self) -> int:
        return self.first + self.rows - 1


@dataclass(slots=True, kw_only=True)
class Scene:
    """Where the engine is when a mutant acts. memory: the mutant's own, empty when it is armed."""

    args: Mapping[str, Any]
    memory: dict[Any, Any]
    phase: str = ""
    step: int = 0
    batch: int = 0  # batches begun in this scenario
    page: int = 1
    shares: list[Share] = field(default_factory=list)
    #: what the forward before this returned, [rows, vocab]
    logits: torch.Tensor | None = None
    #: what the target chose after each request's last prompt row [b]
    guesses: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The value the mutant is about."""
        return str(self.args["field"])

    def rows(self) -> list[int]:
        """Rows the mutant is about, by its `at`."""
        at = self.args.get("at", "all")
        if at == "last-request":
            return [self.shares[-1].last] if len(self.shares) > 1 else []
        rows: list[int] = []
        for share in self.shares:
            if at == "all":
                rows += range(share.first, share.last + 1)
            elif at == "inner":
                rows += range(share.first + 1, share.last + 1)
            elif at == "last" or (at == "border" and not share.final) or (at == "retracted" and share.epoch):
                rows.append(share.last)
        return rows


Act = Callable[[Scene, Values], Values]
ACTS: dict[str, Act] = {}


def act(function: Act) -> Act:
    """Decorator: make a change known by its name."""
    ACTS[function.__name__] = function
    return function


def _moved(scene: Scene, values: Values, source: Callable[[Share, int], int]) -> Values:
    """The field with each row the mutant is about taken from row `source(share, row)`."""
    before = values[scene.name]
    after, rows = before.clone(), set(scene.rows())
    for share in scene.shares:
        for row in range(share.first, share.last + 1):
            if row in rows:
                after[row] = before[source(share, row)]
    return {scene.name: after}


@act
def add(scene: Scene, values: Values) -> Values:
    after = values[scene.name].clone()
    for row in scene.rows():  # a list of rows would have to reach the device, which a graph's capture forbids
        after[row] += int(scene.args["by"])
    return {scene.name: after}


@act
def next_page(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name] + scene.page}


@act
def zero(scene: Scene, values: Values) -> Values:
    after = values[scene.name].clone()
    for row in scene.rows():
        after[row] = 0
    return {scene.name: after}


@act
def previous_row(scene: Scene, values: Values) -> Values:
    return _moved(scene, values, lambda share, row: max(row - 1, share.first))


@act
def next_row(scene: Scene, values: Values) -> Values:
    return _moved(scene, values, lambda share, row: min(row + 1, share.last))


@act
def first_row(scene: Scene, values: Values) -> Values:
    return _moved(scene, values, lambda share, row: share.first)


@act
def neighbour(scene: Scene, values: Values) -> Values:
    """From the next request of the batch: row by row, or tail from tail where only last rows are meant."""
    partner = {share.rid: other for share, other in zip(scene.shares, scene.shares[1:] + scene.shares[:1], strict=True)}

    def source(share: Share, row: int) -> int:
        other = partner[share.rid]
        from_start = other.first + min(row - share.first, other.rows - 1)
        return other.last if scene.args.get("at") == "last" else from_start

    return _moved(scene, values, source)


@act
def frozen(scene: Scene, values: Values) -> Values:
    """Every later step of a round gets what the first one had."""
    step, first = scene.memory.get("first", (scene.step, None))
    if scene.step <= step:
        scene.memory["first"] = scene.step, values[scene.name].clone()
        return {}
    return {scene.name: first.clone()}


@act
def restart(scene: Scene, values: Values) -> Values:
    after = values[scene.name].clone()
    for share in scene.shares:
        after[share.first : share.last + 1] -= share.start
    return {scene.name: after}


@act
def target_guess(scene: Scene, values: Values) -> Values:
    after, rows = values[scene.name].clone(), set(scene.rows())
    for number, share in enumerate(scene.shares):
        if share.last in rows and scene.guesses is not None:
            after[share.last] = scene.guesses[number]
    return {scene.name: after}


@act
def from_before(scene: Scene, values: Values) -> Values:
    """The first step of a round gets what the request had there one round earlier."""
    if scene.step > 0:
        return {}
    before, after = values[scene.name], values[scene.name].clone()
    for share in scene.shares:
        old = scene.memory.get(share.rid)
        scene.memory[share.rid] = before[share.first : share.last + 1].clone()
        if old is not None:
            after[share.first : share.last + 1] = old
    return {scene.name: after}


@act
def narrow(scene: Scene, values: Values) -> Values:
    value = values[scene.name]
    return {scene.name: value[:, : value.shape[1] // 2].contiguous()}


@act
def coarse(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name].to(torch.bfloat16)}


@act
def second_best(scene: Scene, values: Values) -> Values:
    """Each row's choices without the best one."""
    ids = values[scene.name]
    if scene.logits is None or scene.logits.shape[0] != ids.shape[0]:
        return {}
    runners_up = scene.logits.topk(ids.shape[-1] + 1, dim=-1).indices[:, 1:]
    return {scene.name: runners_up.to(ids.dtype)}


@act
def mirrored(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name].flip(-1)}


@act
def squared(scene: Scene, values: Values) -> Values:
    return {scene.name: values[scene.name] ** 2} if scene.name in values else {}
