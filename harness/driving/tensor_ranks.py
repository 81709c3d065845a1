"""What the other TP ranks of a DP rank say of the same batches, held against what the first of them says.

A trace has the rows of the first TP rank. Of another, what is the same is counted and dropped; what differs is kept as
an event a row. Ranks decide for themselves from values that a reduction gave to all of them, so the same means the same
bits. It must not judge: `checks.tensor_ranks` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harness.contract.align import align
from harness.contract.rows import LIST_COLUMNS, Rows
from harness.contract.trace import Event, RoundRecord, Trace

Found = tuple[int, dict[str, Any]]

#: Of a batch: what every rank does alike.
OF_BATCH = ("scheduler_step", "mode", "rids", "attempts", "starts", "lens", "final", "forwards", "graphs", "num_steps")
#: Everything of a row that ranks share, in the order in which it comes about.
OF_ROW = (
    *("round", "scheduler_step", "input_id", "position", "cache_slot", "parent", "slots_shared", "slots_read"),
    *("hidden_in", "hidden_out", "lse", *LIST_COLUMNS),
)


def compared(first: Trace, others: Mapping[tuple[int, int], Trace]) -> Iterator[Event]:
    """A 'tp_rank' event a rank (data: tp_rank, rows that were held against the first's), then its 'tp_differs'.

    others: (dp_rank, tp_rank) -> what that rank reported; first: what the first TP rank of each DP rank did.

    tp_differs: data has tp_rank, round, phase, step, column and its values first_rank and this_rank; of a row also its
    key. Of a row that differs only the column that comes about first is named.
    """
    for (dp_rank, tp_rank), other in sorted(others.items()):
        found = [*_batches(first, other, dp_rank), *_rows(first, other, dp_rank)]
        counted = {"tp_rank": tp_rank, "rows": len(other.rows)}
        yield Event(name="tp_rank", scheduler_step=-1, dp_rank=dp_rank, data=counted)
        for scheduler_step, data in found:
            data["tp_rank"] = tp_rank
            yield Event(name="tp_differs", scheduler_step=scheduler_step, dp_rank=dp_rank, data=data)


def _batches(first: Trace, other: Trace, dp_rank: int) -> Iterator[Found]:
    """Batches that one of the two ranks did not have, or had otherwise."""
    mine, theirs = _by_number(first, dp_rank), _by_number(other, dp_rank)
    for number in sorted(mine.keys() | theirs.keys()):
        one, two = mine.get(number), theirs.get(number)
        where = one or two
        assert where is not None
        data: dict[str, Any] = {"round": number, "phase": "IDLE", "step": 0}
        if one is None or two is None:
            ran = ("none", "a batch") if one is None else ("a batch", "none")
            yield where.scheduler_step, {**data, "column": "batch", "first_rank": ran[0], "this_rank": ran[1]}
            continue
        for name in OF_BATCH:
            if getattr(one, name) != getattr(two, name):
                said = {"first_rank": _said(getattr(one, name)), "this_rank": _said(getattr(two, name))}
                yield where.scheduler_step, {**data, "column": name, **said}
                break


def _by_number(trace: Trace, dp_rank: int) -> dict[int, RoundRecord]:
    return {record.index: record for record in trace.rounds if record.dp_rank == dp_rank}


def _said(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _rows(first: Trace, other: Trace, dp_rank: int) -> Iterator[Found]:
    """Rows that one of the two ranks did not have, or had otherwise."""
    pairs = align(first.rows, other.rows)
    for row in pairs.reference_only.tolist():
        yield _of_row(other.rows, row, column="row", first_rank="none", this_rank="a row")
    for row in pairs.engine_only.tolist():
        if first.rows.ints["dp_rank"][row] == dp_rank:
            yield _of_row(first.rows, row, column="row", first_rank="a row", this_rank="none")
    named = set[int]()
    for column in OF_ROW:
        for mine, theirs in zip(pairs.engine.tolist(), pairs.reference.tolist(), strict=True):
            one, two = _values(first, column, mine), _values(other, column, theirs)
            if mine not in named and not np.array_equal(one, two, equal_nan=one.dtype.kind == "f"):
                named.add(mine)
                yield _of_row(first.rows, mine, column=column, first_rank=one.tolist(), this_rank=two.tolist())


def _values(trace: Trace, column: str, row: int) -> np.ndarray:
    """[w]: what a row has there; of a hidden state its floats [h], [0] of a row without one."""
    rows = trace.rows
    if column in rows.lists:
        return rows.lists[column][row]
    found: np.ndarray = (rows.floats if column in rows.floats else rows.ints)[column][row : row + 1]
    if not column.startswith("hidden"):
        return found
    tensor = trace.tensors.get(f"{column}.{rows.strings['phase'][row]}", np.empty((0, 0), dtype=np.float32))
    states: np.ndarray = tensor[found[found >= 0]]
    return states.reshape(-1)


def _of_row(rows: Rows, row: int, **data: Any) -> Found:
    key = rows.key(row)
    names = ("rid", "attempt", "committed", "phase", "step", "slot")
    own = {name: getattr(key, name) for name in names} | {"round": int(rows.ints["round"][row])}
    return int(rows.ints["scheduler_step"][row]), {**own, **data}
