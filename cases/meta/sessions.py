"""Requests, free-running sessions of the reference, and whether two traces have the same rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cases.meta.handmade import asking
from cases.meta.speculating import FreeSession
from harness.contract.requests import RequestSpec
from harness.contract.rows import FLOAT_COLUMNS, INT_COLUMNS, LIST_COLUMNS, RowBuilder, Rows
from harness.contract.settings import SpecConfig
from harness.contract.trace import Event, Trace
from harness.contract.types import Key
from reference.pairs import AnyHead

SPECS = [
    SpecConfig(num_steps=3, eagle_topk=1, num_draft_tokens=4),
    SpecConfig(num_steps=1, eagle_topk=1, num_draft_tokens=2),
    SpecConfig(num_steps=3, eagle_topk=3, num_draft_tokens=8),
    SpecConfig(num_steps=2, eagle_topk=4, num_draft_tokens=5),
]
SPEC_IDS = [f"k{spec.num_steps}t{spec.eagle_topk}n{spec.num_draft_tokens}" for spec in SPECS]


def request_of(
    rng: random.Random, vocab: int = 510, *, rid: str = "r0", longest: int = 40, new: int = 12, **more: Any
) -> RequestSpec:
    """A request with a random prompt."""
    prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, longest)))
    return RequestSpec(rid=rid, input_ids=prompt, max_new_tokens=new, **more)


def run(head: AnyHead, spec: SpecConfig, seed: int = 0, **more: Any) -> tuple[FreeSession, RequestSpec, Trace]:
    """A session, one request, and its free-running trace, which stands in for an engine's."""
    session = FreeSession(head.target, head, spec)
    request = request_of(random.Random(seed), **more)
    return session, request, session.speculate(request, chunk=7)


def stopped(trace: Trace) -> list[Event]:
    """What the reference could not follow."""
    return list(trace.named("reference_stopped"))


def by_key(trace: Trace) -> dict[Key, int]:
    """Row numbers by key."""
    keys = [trace.rows.key(i) for i in range(len(trace.rows))]
    assert len(set(keys)) == len(keys), "a key must not repeat"
    return dict(zip(keys, range(len(keys)), strict=True))


def edited(
    trace: Trace,
    keep: Callable[[Rows, int], bool] = lambda rows, i: True,
    change: Callable[[Rows, int, dict[str, Any]], None] = lambda rows, i, values: None,
) -> Trace:
    """A copy of a trace with rows left out or changed in place."""
    rows, builder = trace.rows, RowBuilder()
    for i in range(len(rows)):
        if keep(rows, i):
            columns = (rows.ints, rows.strings, rows.floats, rows.lists)
            values = {name: column[i] for group in columns for name, column in group.items()}
            change(rows, i, values)
            builder.add(**values)
    return replace(trace, rows=builder.build())


def assert_same_rows(mine: Trace, other: Trace, *, but: Sequence[str] = ()) -> None:
    """Every key on both sides, every integer equal, every float close."""
    a, b = by_key(mine), by_key(other)
    assert a.keys() == b.keys()
    for key in a:
        i, j = a[key], b[key]
        for name in INT_COLUMNS:
            if name.startswith("hidden_"):
                _assert_same_hidden(mine, other, name, i, j)
            elif name not in but:
                assert mine.rows.ints[name][i] == other.rows.ints[name][j], (key, name)
        for name in FLOAT_COLUMNS:
            np.testing.assert_allclose(mine.rows.floats[name][i], other.rows.floats[name][j], atol=1e-4)
        for name in LIST_COLUMNS:
            np.testing.assert_allclose(mine.rows.lists[name][i], other.rows.lists[name][j], atol=1e-4, err_msg=name)


def assert_replayed(session: FreeSession, requests: Sequence[RequestSpec], engine: Trace, **how: Any) -> None:
    """The reference follows an engine to the end and says the same rows. how: arguments of `replay`."""
    replayed = session.replay(asking(*requests, spec=session.spec), engine, **how)
    assert (replayed.side, stopped(replayed)) == ("reference", [])
    assert_same_rows(replayed, engine)


def _assert_same_hidden(mine: Trace, other: Trace, name: str, i: int, j: int) -> None:
    phase = mine.rows.strings["phase"][i]
    x, y = int(mine.rows.ints[name][i]), int(other.rows.ints[name][j])
    assert (x < 0) == (y < 0)
    if x >= 0:
        a, b = mine.tensors[f"{name}.{phase}"][x], other.tensors[f"{name}.{phase}"][y]
        np.testing.assert_allclose(a, b, atol=1e-4)
