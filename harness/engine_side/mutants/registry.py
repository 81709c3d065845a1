"""What an act is given and what it returns, every act by its name, and the values of a forward's inputs.

Engine side: standard library and torch only. It must not wrap anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

#: Tensors of a site by the names of `both_sides.mutants.SITES`.
Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Share:
    """One request's rows in a forward: rows [first, first + rows)."""

    rid: str
    first: int
    rows: int
    start: int = 0  # committed length of the request
    final: bool = True  # whether its prompt ends in this batch
    attempt: int = 0  # times it had been retracted

    @property
    def last(self) -> int:
        return self.first + self.rows - 1


@dataclass(slots=True, kw_only=True)
class Context:
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
    #: draft state that went into the last forward of this phase with requests, [rows, h]
    state: torch.Tensor | None = None

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
            elif at == "first":
                rows += [share.first] if share.rows else []
            elif at == "inner":
                rows += range(share.first + 1, share.last + 1)
            elif at == "decoding" and not (share.start and share.rows == 1 and share.final):
                continue
            elif (
                at in ("last", "decoding")
                or (at == "border" and not share.final)
                or (at == "retracted" and share.attempt)
            ):
                rows.append(share.last)
        return rows


#: The values of a site -> those of them that become others, made on copies.
Act = Callable[[Context, Values], Values]
ACTS: dict[str, Act] = {}
#: Acts that change no value but whether a forward runs, and how often: `sites` does them.
FORWARD_ACTS = ("skip", "twice")


def act(function: Act) -> Act:
    """Decorator: make a change known by its name."""
    ACTS[function.__name__] = function
    return function


#: Value of a site -> attribute of a ForwardBatch.
INPUTS = {"input_ids": "input_ids", "positions": "positions", "slots": "out_cache_loc"}
COUNTS = "global_num_tokens_cpu"


def inputs_of(forward_batch: Any) -> Values:
    """What goes into a forward."""
    values = {name: getattr(forward_batch, attribute) for name, attribute in INPUTS.items()}
    hidden = getattr(forward_batch.spec_info, "hidden_states", None)
    return values | ({"hidden": hidden} if isinstance(hidden, torch.Tensor) else {})


@contextmanager
def mapped(worker: Any, change: Callable[[Values], Values]) -> Iterator[None]:
    """With what `change` makes of a draft worker's map from draft ids to target ids, where it has one."""
    own = getattr(worker, "hot_token_id", None)
    changed = {} if own is None else change({"map": own})
    if "map" in changed:
        worker.hot_token_id = changed["map"]
    try:
        yield
    finally:
        if "map" in changed:
            worker.hot_token_id = own


@contextmanager
def replaced(forward_batch: Any, changed: Values) -> Iterator[None]:
    """For one forward: afterwards the worker goes on from what it had itself, e.g. positions it advances in place."""
    owners = {name: (forward_batch, attribute) for name, attribute in INPUTS.items()}
    owners |= {"hidden": (forward_batch.spec_info, "hidden_states"), "counts": (forward_batch, COUNTS)}
    before = {name: getattr(*owners[name]) for name in changed}
    for name, value in changed.items():
        setattr(*owners[name], value.tolist() if name == "counts" else value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(*owners[name], value)
