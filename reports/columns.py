"""What every frame holds, column by column: name, dtype, unit and meaning. docs/frames.md repeats it, word for word.

A column is described here before it exists; a frame with another column cannot be made. This module must not read runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

#: pandas dtype -> how it lies in Parquet. `list` is an object column of tuples, the one thing pandas has no dtype for.
ARROW: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "Int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "boolean": pa.bool_(),
    "list": pa.list_(pa.int64()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. dtype: a key of ARROW. unit: what one counts, or empty for names and ids."""

    name: str
    dtype: str
    unit: str
    meaning: str


def _columns(*described: tuple[str, str, str, str]) -> tuple[Column, ...]:
    return tuple(Column(name=name, dtype=dtype, unit=unit, meaning=meaning) for name, dtype, unit, meaning in described)


CASE = _columns(
    ("run", "string", "", "run folder's name"),
    ("scenario", "string", "", "scenario's name"),
    ("scenario_id", "string", "", "hash of its content"),
)
PLACE = _columns(
    ("dp_rank", "int64", "", "data-parallel rank"),
    ("rid", "string", "", "request; empty where a row is about a rank"),
    ("attempt", "int64", "retractions", "how often the request had started over"),
    ("committed", "int64", "tokens", "committed length before the round, chunk start in a prefill; -1: does not apply"),
    ("round", "int64", "batches", "scheduler batch within the scenario and rank; -1: none"),
)
ROW = _columns(
    ("phase", "string", "", "PREFILL, DRAFT_PREFILL, DRAFT, VERIFY, ACCEPT, EXTEND, IDLE or PREBUILT"),
    ("step", "int64", "forwards", "draft step within the round; layer of a multi-layer draft"),
    ("slot", "int64", "rows", "beam, tree node, committed token, or row of the chunk"),
)

FINDINGS = (
    *CASE,
    *_columns(
        ("signature", "string", "", "identity of the failure: kind:check:phase:hint"),
        ("kind", "string", "", "what is wrong, see interpreting-results.md"),
        ("check", "string", "", "the check that saw it"),
    ),
    *PLACE,
    *ROW,
    *_columns(
        ("expected", "string", "", "reference or invariant, as JSON"),
        ("observed", "string", "", "engine, as JSON"),
        ("policy", "string", "", "EXACT, TIE or BUDGET"),
        ("margin", "float64", "logits", "how far apart the reference holds the two choices; NaN: no choice"),
        ("hint", "string", "", "how the two values are related; empty: not known"),
        ("first", "bool", "", "the scenario's first divergence"),
        ("cause", "string", "", "signature of the earlier finding that explains this one; empty: a root"),
    ),
)
ROUNDS = (
    *CASE,
    *PLACE,
    *_columns(
        ("scheduler_step", "int64", "steps", "scheduler step within the scenario"),
        ("mode", "string", "", "PREFILL, DECODE, IDLE or PREBUILT"),
        ("batch", "int64", "requests", "size of the whole batch; 0: an idle or an empty one, which has one row here"),
        ("length", "int64", "tokens", "chunk length, or tokens committed by the verify"),
        ("final", "bool", "", "whether the prompt ends with this chunk"),
        ("draft_forwards", "int64", "forwards", "draft forwards that the rank entered before the verify"),
        ("verify_forwards", "int64", "forwards", "verify forwards that the rank entered"),
        ("extend_forwards", "int64", "forwards", "draft extend forwards that the rank entered"),
        ("graphs", "string", "", "phases that ran in a CUDA graph, with captured batch size: DRAFT=4 VERIFY=4"),
        ("roots", "int64", "divergences", "divergences here that nothing earlier explains"),
        ("consequences", "int64", "divergences", "divergences here that follow from an earlier one"),
    ),
)
POSITIONS = (
    *CASE,
    *PLACE,
    *ROW,
    *_columns(
        ("sides", "string", "", "both, engine or reference: who has this row"),
        ("state", "string", "", "same, consequence or wrong, as judged when the run ended"),
        ("input_id", "Int64", "token id", "token the engine fed; the committed one in ACCEPT"),
        ("reference_input_id", "Int64", "token id", "what it should have been"),
        ("position", "Int64", "tokens", "position the engine fed; -1: the row has none"),
        ("reference_position", "Int64", "tokens", "what it should have been"),
        ("cache_slot", "Int64", "KV slots", "KV slot the engine wrote; the reference has none; -1: not recorded"),
        ("parent", "Int64", "rows", "tree node it hangs from, or node that chose a committed token; -1: root or none"),
        ("reference_parent", "Int64", "rows", "what it should have been"),
        ("chosen", "list", "token ids", "what the engine chose from this row: proposals, or the target's argmax"),
        ("reference_chosen", "list", "token ids", "what the reference chose"),
        ("margin", "float64", "logits", "reference's best logit minus its second best; NaN: the row has no logits"),
        ("hidden_in_error", "float64", "absolute", "greatest error of the state that the row read; NaN: not recorded"),
        ("hidden_in_limit", "float64", "absolute", "error allowed there"),
        ("hidden_out_error", "float64", "absolute", "greatest error of the state that the row gave; NaN: not recorded"),
        ("hidden_out_limit", "float64", "absolute", "error allowed there"),
        ("logits_error", "float64", "absolute", "greatest error among logits that both sides kept; NaN: none"),
        ("logits_limit", "float64", "absolute", "error allowed there"),
    ),
)
COVERAGE = (
    *CASE,
    *_columns(
        ("coverage_point", "string", "", "its name in harness/coverage"),
        ("asked", "bool", "", "whether the scenario asked for it"),
        ("times", "int64", "times", "how often the trace shows it"),
        ("positions", "int64", "rows", "positions compared inside it"),
    ),
)
ACCEPT_LENGTHS = (
    *CASE,
    *PLACE,
    *_columns(
        ("algorithm", "string", "", "EAGLE, EAGLE3 or MTP"),
        ("num_steps", "int64", "forwards", "speculative steps"),
        ("eagle_topk", "int64", "tokens", "candidates a step"),
        ("num_draft_tokens", "int64", "nodes", "nodes of the verified tree, root included"),
        ("accept_len", "int64", "tokens", "tokens that this verify committed, the bonus included: 1 to k+1"),
        ("expected_len", "Int64", "tokens", "what the papers' own proposals would have committed; NA: not known"),
    ),
)
TRENDS = _columns(
    ("run", "string", "", "run folder's name"),
    ("created", "string", "UTC, ISO 8601", "when the run began"),
    ("engine", "string", "", "SGLang release"),
    ("device", "string", "", "where the engine ran"),
    ("verdict", "string", "", "PASS, FAIL or UNKNOWN; UNKNOWN too for a run that was cut off"),
    ("scenarios", "int64", "scenarios", "judged in the run"),
    ("failed", "int64", "scenarios", "of them FAIL"),
    ("unknown", "int64", "scenarios", "of them UNKNOWN"),
    ("signatures", "int64", "signatures", "different root signatures"),
    ("positions", "int64", "rows", "positions compared"),
    ("choices", "int64", "choices", "token choices that could have been ties: tokens and proposals compared"),
    ("ties", "int64", "choices", "of them ties"),
    ("tie_rate", "float64", "share", "ties / choices; NaN: no choices"),
    ("verifies", "int64", "verifies", "verifies of one request each"),
    ("accept_mean", "float64", "tokens", "mean accept length; NaN: no verify"),
    ("accept_std", "float64", "tokens", "its standard deviation over verifies; NaN: fewer than two"),
    ("expected_mean", "float64", "tokens", "mean expected accept length of the verifies where it is known; NaN: none"),
    ("lost_percent", "float64", "percent", "of that, not observed in the same verifies; NaN: none"),
)

#: Every frame by name, in the order of the documentation.
FRAMES: dict[str, tuple[Column, ...]] = {
    "findings": FINDINGS,
    "rounds": ROUNDS,
    "positions": POSITIONS,
    "coverage": COVERAGE,
    "accept_lengths": ACCEPT_LENGTHS,
    "trends": TRENDS,
}
ROWS_OF: dict[str, str] = {
    "findings": "one row a divergence",
    "rounds": "one row for each request of each batch; a batch without requests has one row with an empty rid",
    "positions": "one row for each row that either side recorded, paired by meaning",
    "coverage": "one row for each coverage point of each scenario",
    "accept_lengths": "one row for each verify of each request",
    "trends": "one row a run",
}


def frame(name: str, values: Mapping[str, Any]) -> pd.DataFrame:
    """The frame `name` from a sequence (or a scalar, repeated) a column; ValueError for any other set of columns."""
    wanted = FRAMES[name]
    missing, foreign = {c.name for c in wanted} - set(values), set(values) - {c.name for c in wanted}
    if missing or foreign:
        raise ValueError(f"frame {name!r}: missing {sorted(missing)}, not described {sorted(foreign)}")
    length = next((len(value) for value in values.values() if _is_many(value)), 0)
    return pd.DataFrame({column.name: _series(values[column.name], column, length) for column in wanted})


def empty(name: str) -> pd.DataFrame:
    """The frame `name` without rows, every column of its dtype."""
    return frame(name, {column.name: [] for column in FRAMES[name]})


def arrow_schema(name: str) -> pa.Schema:
    """How the frame lies in Parquet; unit and meaning travel as field metadata."""
    return pa.schema(
        [
            pa.field(c.name, ARROW[c.dtype], metadata={b"unit": c.unit.encode(), b"meaning": c.meaning.encode()})
            for c in FRAMES[name]
        ]
    )


def documentation(name: str) -> str:
    """The frame as Markdown: what a row is, then a table of its columns."""
    lines = [f"## {name}", "", f"{ROWS_OF[name][0].upper()}{ROWS_OF[name][1:]}.", ""]
    lines += ["| column | dtype | unit | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{c.name}` | {c.dtype} | {c.unit or '–'} | {c.meaning} |" for c in FRAMES[name]]
    return "\n".join(lines) + "\n"


def join(name: str, parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Frames of one sort under each other, rows numbered anew; the empty frame where there are none."""
    kept: Sequence[pd.DataFrame] = [part for part in parts if len(part)]
    return pd.concat(kept, ignore_index=True) if kept else empty(name)


def _is_many(value: Any) -> bool:
    return not isinstance(value, str) and hasattr(value, "__len__")


def _series(value: Any, column: Column, length: int) -> pd.Series:
    if not _is_many(value):
        value = [value] * length
    if column.dtype != "list":
        return pd.Series(value, dtype=column.dtype, name=column.name)
    held = np.empty(len(value), dtype=object)
    held[:] = [tuple(int(one) for one in many) for many in value]
    return pd.Series(held, dtype=object, name=column.name)
