"""Compact JSON for the page's script: the rounds of a scenario, and its rows.

The rounds are read when a scenario is chosen, the rows only when somebody opens a round. Numbers instead of names,
one array a column, and the reference's values only where they differ. This module must not know how it is drawn.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from harness.checks.describe import describe
from harness.contract.types import Divergence
from harness.driving.results import ScenarioResult
from reports.findings import facts, said_lines
from reports.frames import Frames
from reports.positions import PHASES

#: The last one is ours: a batch that never ended, since the engine died or hung in it.
MODES = ("PREFILL", "DECODE", "IDLE", "PREBUILT", "STOPPED")
STOPPED = MODES.index("STOPPED")
STATES = ("same", "consequence", "wrong")
#: Divergences of one scenario that travel with the page; the rest are in findings.jsonl, and the page says so.
MOST_DIVERGENCES = 4000
#: Columns where the reference has a value of its own.
BESIDE = ("input_id", "position", "parent", "chosen")
ERRORS = ("hidden_in", "hidden_out", "logits")


def scenario_head(result: ScenarioResult, frames: Frames) -> dict[str, Any]:
    """What the map needs, and what stands around it."""
    scenario, rids = result.scenario, _rids(result, frames)
    number = {rid: place for place, rid in enumerate(rids)}
    return {
        "name": scenario.name,
        "id": scenario.id,
        "outcome": str(result.verdict.outcome),
        "pair": " + ".join(Path(side).name for side in result.setup.pair) if result.setup.pair else scenario.checkpoint,
        "facts": facts(result),
        "reasons": list(result.verdict.reasons),
        "spec": scenario.spec.model_dump(),
        "requests": [_request(result, rid) for rid in rids],
        "rounds": [*_rounds(frames.rounds, number, _rank_states(result)), *_stopped(result, frames, number)],
        "findings": [
            {
                "signature": found.signature,
                "kind": str(found.first.kind),
                "count": found.count,
                "cause": found.consequence_of or "",
                "text": "\n".join(
                    [describe(found.first, scenario), *(f"  {line}" for line in said_lines(result, found.signature))]
                ),
                "at": [found.first.key.dp_rank, found.first.round, number.get(found.first.key.rid, -1)],
            }
            for found in result.findings
        ],
        "folder": str(result.folder),
        "reproducer": None if result.reproducer is None else str(result.reproducer),
        "positions": len(frames.positions),
    }


def scenario_rows(result: ScenarioResult, frames: Frames) -> dict[str, Any]:
    """The rows of every round, in the order of the positions frame, and where each request's share of a round lies."""
    table, rids = frames.positions, _rids(result, frames)
    number = {rid: place for place, rid in enumerate(rids)}
    found: dict[str, Any] = {
        "at": _shares(table, number),
        "phase": [PHASES.index(phase) for phase in table["phase"]],
        "state": [STATES.index(state) for state in table["state"]],
        "sides": {str(at): side for at, side in enumerate(table["sides"].tolist()) if side != "both"},
        "margin": _short_numbers(table["margin"]),
    }
    for name in ("step", "slot"):
        found[name] = table[name].tolist()
    for name in ("input_id", "position", "parent", "cache_slot"):
        found[name] = _integers(table[name])
    found["chosen"] = [list(many) for many in table["chosen"]]
    found["reference"] = {name: _differing(table, name) for name in BESIDE}
    for name in ERRORS:
        found[name] = _short_numbers(table[f"{name}_error"])
        found[f"{name}_limit"] = _short_numbers(table[f"{name}_limit"])
    found["divergences"] = [_divergence(one, number) for one in result.divergences[:MOST_DIVERGENCES]]
    found["divergences_left_out"] = max(len(result.divergences) - MOST_DIVERGENCES, 0)
    return found


def embedded(value: object) -> Markup:
    """JSON that may stand inside a script element: no `<`, so nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c"))


def _rids(result: ScenarioResult, frames: Frames) -> list[str]:
    """Requests in the order of the scenario, then any that only the trace knows."""
    known = [request.rid for request in result.scenario.sampled.requests]
    seen = [rid for rid in [*frames.rounds["rid"].tolist(), *frames.positions["rid"].tolist()] if rid]
    return list(dict.fromkeys([*known, *seen]))


def _request(result: ScenarioResult, rid: str) -> list[Any]:
    """[rid, rank, prompt length, most new tokens]; a request that the scenario lacks has neither."""
    known = {request.rid: request for request in result.scenario.sampled.requests}.get(rid)
    return [rid, 0, 0, 0] if known is None else [rid, known.dp_rank, len(known.input_ids), known.max_new_tokens]


def _rounds(table: pd.DataFrame, number: dict[str, int], ranks: dict[tuple[int, int], int]) -> list[list[Any]]:
    """[rank, index, scheduler step, mode, [draft, verify, extend] forwards, graphs, parts, the rank's own state] each.

    A part: [request, attempt, committed, length, final, state].
    """
    found: dict[tuple[int, int], list[Any]] = {}
    for row in table.itertuples(index=False):
        place = (int(row.dp_rank), int(row.round))
        if place not in found:
            forwards = [int(row.draft_forwards), int(row.verify_forwards), int(row.extend_forwards)]
            head = [*place, int(row.scheduler_step), MODES.index(row.mode), forwards, row.graphs]
            found[place] = [*head, [], ranks.get(place, 0)]
        if row.rid:
            state = 2 if row.roots else 1 if row.consequences else 0
            part = [number[row.rid], int(row.attempt), int(row.committed), int(row.length), int(row.final), state]
            found[place][6].append(part)
    return list(found.values())


def _stopped(result: ScenarioResult, frames: Frames, number: dict[str, int]) -> list[list[Any]]:
    """Batches that left findings or rows but no record of their end, as rounds one scheduler step behind the last."""
    known = set(zip(frames.rounds["dp_rank"].tolist(), frames.rounds["round"].tolist(), strict=True))
    wrong = {(one.key.dp_rank, one.round) for one in result.divergences if one.round >= 0}
    table, step = frames.positions, int(frames.rounds["scheduler_step"].max() if len(frames.rounds) else -1) + 1
    found = []
    for place in sorted({*zip(table["dp_rank"].tolist(), table["round"].tolist(), strict=True), *wrong} - known):
        rows = table[(table["dp_rank"] == place[0]) & (table["round"] == place[1]) & (table["sides"] != "reference")]
        parts = []
        for rid, part in rows.groupby("rid", sort=False):
            if rid:
                worst = max(map(STATES.index, part["state"]))
                parts.append([number[rid], int(part["attempt"].iloc[0]), int(part["committed"].iloc[0]), 0, 0, worst])
        own = [one for one in result.divergences if (one.key.dp_rank, one.round) == place and not one.cause]
        if parts or own:
            found.append([*place, step, STOPPED, [0, 0, 0], "", parts, 2 if own else 0])
    return found


def _rank_states(result: ScenarioResult) -> dict[tuple[int, int], int]:
    """(rank, round) -> the worst that is said of the rank itself there, of no request."""
    found: dict[tuple[int, int], int] = {}
    for one in result.divergences:
        if not one.key.rid:
            place = (one.key.dp_rank, one.round)
            found[place] = max(found.get(place, 0), 1 if one.cause else 2)
    return found


def _shares(table: pd.DataFrame, number: dict[str, int]) -> dict[str, list[int]]:
    """'rank,round,request' -> [first row, row behind the last]."""
    found: dict[str, list[int]] = {}
    places = zip(table["dp_rank"].tolist(), table["round"].tolist(), table["rid"].tolist(), strict=True)
    for at, (rank, index, rid) in enumerate(places):
        name = f"{rank},{index},{number[rid]}" if rid else f"{rank},{index},-1"
        found.setdefault(name, [at, at])[1] = at + 1
    return found


def _integers(column: pd.Series) -> list[int | None]:
    return [None if missing else int(value) for value, missing in zip(column, column.isna(), strict=True)]


def _short_numbers(column: pd.Series) -> list[float | str | None]:
    """Three digits are enough to look at; what is not finite travels as text."""
    return [_short_number(value) for value in column.tolist()]


def _short_number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "not finite"


def _differing(table: pd.DataFrame, name: str) -> dict[str, Any]:
    """Row -> the reference's value where it is another one than the engine's; null: it has no such row."""
    mine, theirs = table[name], table[f"reference_{name}"]
    if name == "chosen":
        there = (table["sides"] != "engine").tolist()
        rows = zip(mine.tolist(), theirs.tolist(), there, strict=True)
        return {str(at): list(one) if both else None for at, (ours, one, both) in enumerate(rows) if ours != one}
    ours, truth = _integers(mine), _integers(theirs)
    return {str(at): b for at, (a, b) in enumerate(zip(ours, truth, strict=True)) if a != b}


def _divergence(found: Divergence, number: dict[str, int]) -> list[Any]:
    """[rank, round, request, phase, step, slot, kind, check, expected, observed, hint, cause, policy]."""
    key = found.key
    return [
        *(key.dp_rank, found.round, number.get(key.rid, -1), str(key.phase), key.step, key.slot, str(found.kind)),
        *(found.check, _said(found.expected), _said(found.observed), found.hint, found.cause, str(found.policy)),
    ]


def _said(value: object) -> str:
    """A value in a few words: limits and errors of a NUMERIC come as objects."""
    if isinstance(value, dict):
        words = {"limit_abs": "up to", "greatest_abs": "off by"}
        kept = [f"{words[name]} {_digits(value[name])}" for name in words if name in value]
        return ", ".join(kept) or json.dumps(value, sort_keys=True, default=str)
    return str(value)


def _digits(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
