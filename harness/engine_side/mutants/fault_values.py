"""What a mutant may change at a place of SGLang's, read as values by name, and put back.

Engine side: torch and the standard library. It must not wrap anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..probes.recorder import plain_rid
from .fault_acts import Share, Values


def people(reqs: Sequence[Any]) -> list[Share]:
    """One share a request, where only who they are matters."""
    return [Share(plain_rid(req.rid), number, 1, 0, True, 0) for number, req in enumerate(reqs)]


def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is not other and (one.shape != other.shape or one.dtype != other.dtype or not torch.equal(one, other))


#: Field of a mutant -> argument of what walks by coins.
COINS = {"nodes": "uniform_samples", "final": "uniform_samples_for_final_sampling", "law": "target_probs"}
#: Field of a mutant -> attribute of a ForwardBatch.
INPUTS = {"input_ids": "input_ids", "positions": "positions", "slots": "out_cache_loc"}


def inputs_of(forward_batch: Any) -> Values:
    values = {name: getattr(forward_batch, attribute) for name, attribute in INPUTS.items()}
    hidden = getattr(forward_batch.spec_info, "hidden_states", None)
    return values | ({"hidden": hidden} if isinstance(hidden, torch.Tensor) else {})


@contextmanager
def replaced(forward_batch: Any, changed: Values) -> Iterator[None]:
    """For one forward: afterwards the worker goes on from what it had itself, e.g. positions it advances in place."""
    owners = {name: (forward_batch, attribute) for name, attribute in INPUTS.items()}
    owners["hidden"] = (forward_batch.spec_info, "hidden_states")
    before = {name: getattr(*owners[name]) for name in changed}
    for name, value in changed.items():
        setattr(*owners[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(*owners[name], value)
