"""What an engine answered requests with, beside their tokens: events 'answer' of its trace.

meta is SGLang's `meta_info`; pieces are what a streamed answer was while it grew, in order, each whole up to there.
Returned hidden states are tensors 'returned.<rid>' [rows, h]. This module must not judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.contract.trace import Trace

#: Of an answer: where a trace has its hidden states.
RETURNED = "returned."


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What was said at one moment: all tokens so far, and what stood beside them."""

    output_ids: tuple[int, ...]
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a request was answered. pieces: of a streamed one, the last is all of it."""

    rid: str
    meta: dict[str, Any]
    pieces: tuple[Piece, ...]
    states: np.ndarray | None


def answers(trace: Trace) -> dict[str, Answer]:
    """By rid; older traces have none."""
    found = {}
    for event in trace.named("answer"):
        pieces = tuple(
            Piece(output_ids=tuple(piece["output_ids"]), meta=piece["meta"]) for piece in event.data["pieces"]
        )
        rid = str(event.data["rid"])
        states = trace.tensors.get(f"{RETURNED}{rid}")
        found[rid] = Answer(rid=rid, meta=event.data["meta"], pieces=pieces, states=states)
    return found


def errors(trace: Trace) -> dict[str, str]:
    """rid -> what SGLang said instead of an answer."""
    return {str(event.data["rid"]): str(event.data["error"]) for event in trace.named("request_error")}


def flat_states(returned: Sequence[Any]) -> np.ndarray | None:
    """`meta_info["hidden_states"]` -> float32 [rows, h]: a chunk is a list of rows, a decoded one a row.

    None where rows differ in width.
    """
    rows = [row for part in returned for row in (part if part and isinstance(part[0], list) else [part])]
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    return np.asarray(rows, dtype=np.float32)
