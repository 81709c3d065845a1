"""Checks that the TP ranks of one DP rank do the same: each decides for itself what all of them go on with.

What ranks hold after a reduction is the same on all, bit by bit, and so is everything that they choose from it. Whether
it is right as well, the comparisons of the first rank's rows with the reference say. What a rank holds before a
reduction is not looked at: a wrong shard makes every rank wrong alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.checks.evidence import Evidence
from harness.checks.findings import PHASE_ORDER
from harness.checks.registry import CheckResult, register
from harness.contract.rows import FLOAT_COLUMNS, LIST_COLUMNS
from harness.contract.trace import Event
from harness.contract.types import Divergence, Key, Kind, Phase

ID = "tp_ranks"
#: In the order in which they come about: columns of a row, then facts of its batch -> what is wrong where one differs.
KINDS: dict[str, Kind] = {
    "row": Kind.MISSING_ROW,
    "round": Kind.LOCKSTEP,
    "scheduler_step": Kind.LOCKSTEP,
    "input_id": Kind.TOKEN,
    "position": Kind.POSITION,
    "cache_slot": Kind.CACHE_SLOT,
    "parent": Kind.PARENT,
    "slots_shared": Kind.CACHE_SLOT,
    "slots_read": Kind.CACHE_SLOT,
    "hidden_in": Kind.NUMERIC,
    "hidden_out": Kind.NUMERIC,
    "lse": Kind.NUMERIC,
    "top_ids": Kind.NUMERIC,
    "top_logits": Kind.NUMERIC,
    "chosen_ids": Kind.TOKEN,
    "chosen_probs": Kind.NUMERIC,
    "lens": Kind.ACCEPT,
}
ORDER = {column: place for place, column in enumerate(KINDS)}


@register(id=ID, kinds=tuple(dict.fromkeys([*KINDS.values(), Kind.EXTRA_ROW])), reads=("scenario", "engine"))
def check_ranks_agree(evidence: Evidence) -> CheckResult:
    """The ranks of a tensor-parallel group feed, hold, choose and accept the same in every round.

    Any kind of a row, and LOCKSTEP: of each rank what differed first, since ranks go on from what they have.

    The hint names the rank: the one that the others outvote, or that is further from the reference where there is one;
    else the one that is not the first.
    """
    result = CheckResult()
    for event in evidence.engine.named("tp_rank"):
        result.count("tp_rows", int(event.data["rows"]))
    for differing in _first_of_each_rank(evidence):
        result.divergences += [_divergence(evidence, event) for event in differing]
    return result


def _first_of_each_rank(evidence: Evidence) -> Iterator[list[Event]]:
    """What differed first on each rank: the rows of one forward, in one column."""
    ranks: dict[tuple[int, int], dict[tuple[int, ...], list[Event]]] = {}
    for event in evidence.engine.named("tp_differs"):
        moments = ranks.setdefault((event.dp_rank, event.data["tp_rank"]), {})
        moments.setdefault(_moment(event), []).append(event)
    return (moments[min(moments)] for _, moments in sorted(ranks.items()))


def _moment(event: Event) -> tuple[int, ...]:
    data = event.data
    order = ORDER.get(data["column"], len(ORDER))
    return event.scheduler_step, data["round"], PHASE_ORDER[data["phase"]], data["step"], order


def _divergence(evidence: Evidence, event: Event) -> Divergence:
    data, column = event.data, str(event.data["column"])
    expected, observed, rank = data["first_rank"], data["this_rank"], data["tp_rank"]
    if _first_is_wrong(evidence, event):
        expected, observed, rank = observed, expected, min(_ranks(evidence, event)) - 1
    if KINDS.get(column) is Kind.NUMERIC:
        expected, observed = _off(expected, observed)
    elif isinstance(expected, list) and len(expected) == 1 == len(observed):
        expected, observed = expected[0], observed[0]
    return Divergence(
        kind=_kind(column, event, observed),
        key=_key(event),
        round=data["round"],
        expected=expected,
        observed=observed,
        hint=f"tp-rank-{rank}",
    )


def _kind(column: str, event: Event, observed: Any) -> Kind:
    if event.data["phase"] == Phase.ACCEPT and column in ("row", "input_id", "parent"):
        return Kind.ACCEPT
    if column == "row" and observed != "none":
        return Kind.EXTRA_ROW
    return KINDS.get(column, Kind.LOCKSTEP)


def _key(event: Event) -> Key:
    data = event.data
    if "rid" not in data:
        return Key.of_rank(event.dp_rank, data["phase"])
    names = ("rid", "attempt", "committed", "phase", "step", "slot")
    return Key(dp_rank=event.dp_rank, **{name: data[name] for name in names})


def _off(expected: list[float], observed: list[float]) -> tuple[Any, Any]:
    """As other comparisons of floats say it; nothing is allowed."""
    if len(expected) != len(observed):
        return f"{len(expected)} values", f"{len(observed)} values"
    one, two = np.asarray(expected, dtype=np.float64), np.asarray(observed, dtype=np.float64)
    off = np.abs(two - one)
    at = int(np.nanargmax(off)) if not np.isnan(off).all() else 0
    scale = float(np.nanmax(np.abs(one))) or 1.0
    greatest = float(off[at]) if np.isfinite(off[at]) else "not finite"
    relative = float(off[at]) / scale if np.isfinite(off[at]) else "not finite"
    mismatched = int(np.sum(one != two))
    return {"limit_abs": 0.0}, {
        "greatest_abs": greatest,
        "greatest_rel": relative,
        "at": at,
        "mismatched": mismatched,
        "of": len(one),
    }


def _ranks(evidence: Evidence, event: Event) -> list[int]:
    """The other ranks of its DP rank; they follow the first."""
    mine = (one for one in evidence.engine.named("tp_rank") if one.dp_rank == event.dp_rank)
    return [int(one.data["tp_rank"]) for one in mine]


def _first_is_wrong(evidence: Evidence, event: Event) -> bool:
    """Whether it is the first rank that stands alone, or that the reference contradicts more."""
    others = _ranks(evidence, event)
    if len(others) > 1:
        alike = [
            one
            for one in evidence.engine.named("tp_differs")
            if _key(one) == _key(event)
            and one.dp_rank == event.dp_rank
            and (one.data["column"], one.data["this_rank"]) == (event.data["column"], event.data["this_rank"])
        ]
        return len(alike) == len(others)
    truth = _truth(evidence, event)
    if truth is None:
        return False
    first, own = (np.asarray(event.data[name], dtype=np.float64) for name in ("first_rank", "this_rank"))
    if not len(truth) == len(first) == len(own):
        return False
    return bool(np.abs(own - truth).max() < np.abs(first - truth).max())


def _truth(evidence: Evidence, event: Event) -> np.ndarray | None:
    """What the reference says of that column of that row, as far as it has an opinion."""
    if evidence.reference is None or evidence.aligned is None or "rid" not in event.data:
        return None
    key, column = _key(event), str(event.data["column"])
    rows, reference = evidence.table.rows, evidence.reference
    mine = evidence.table.groups.get(key.share, {}).get(key.phase, [])
    found = [
        place for place, row in enumerate(evidence.aligned.engine.tolist()) if row in mine and rows.key(row) == key
    ]
    if not found:
        return None
    row = int(evidence.aligned.reference[found[0]])
    if column in ("hidden_in", "hidden_out"):
        place = int(reference.rows.ints[column][row])
        return None if place < 0 else reference.tensors[f"{column}.{key.phase}"][place]
    if column in LIST_COLUMNS:
        return reference.rows.lists[column][row]
    if column in FLOAT_COLUMNS:
        return reference.rows.floats[column][row : row + 1]
    value = reference.rows.ints[column][row : row + 1] if column in ("input_id", "position", "parent") else None
    return value if value is not None and value[0] >= 0 else None
