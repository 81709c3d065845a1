"""pandas frames of a stored run, for every renderer and any notebook. Columns, dtypes and units: columns.toml.

    from reports.frames import read_frames, read_trends
    frames = read_frames("runs/latest")
    frames.positions.query("state != 'same'")

It must not judge: verdicts and divergences are the stored ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.archive.store import StoredScenario
from harness.archive.trace_io import plain
from harness.checks.findings import group
from harness.contract.batches import leading_rounds
from harness.contract.trace import RoundRecord
from harness.contract.types import Divergence, Outcome
from harness.driving.accept_lengths import AcceptLengths, AcceptRounds, total
from reports.columns import FRAMES, empty, frame, join
from reports.positions import position_frame
from reports.source import Source, open_source

#: What a verdict counts as a choice that could have been a tie.
CHOICES = ("tokens", "proposals")
#: Columns that say which request's share of which batch a row is about.
SHARE = ("dp_rank", "rid", "attempt", "committed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The frames of one run, or of one scenario; see reports/columns.py."""

    findings: pd.DataFrame
    rounds: pd.DataFrame
    positions: pd.DataFrame
    coverage: pd.DataFrame
    accept_lengths: pd.DataFrame

    def items(self) -> Iterable[tuple[str, pd.DataFrame]]:
        """(name, frame), in the order of the documentation."""
        return ((name, getattr(self, name)) for name in FRAMES if hasattr(self, name))


def read_frames(run: str | Path | Source) -> Frames:
    """Frames of a run, scenario or reproducer folder; StoreError or TraceError where it is unfit."""
    source = run if isinstance(run, Source) else open_source(Path(run))
    parts = [case_frames(case, run=source.name) for case in source.cases()]
    return Frames(**{name: join(name, [getattr(part, name) for part in parts]) for name in Frames.__slots__})


def case_frames(case: StoredScenario, *, run: str) -> Frames:
    """Frames of one stored scenario. run: what to call the run it belongs to."""
    rounds = round_frame(case, run=run)
    return Frames(
        findings=finding_frame(case, run=run),
        rounds=rounds,
        positions=position_frame(case, run=run),
        coverage=coverage_frame(case, run=run),
        accept_lengths=accept_frame(case, rounds),
    )


def read_trends(runs: Iterable[str | Path]) -> pd.DataFrame:
    """One row a run, ordered by when it began."""
    rows = [trend_row(open_source(Path(run))) for run in runs]
    rows.sort(key=lambda row: (row["created"], row["run"]))
    return frame("trends", {c.name: [row[c.name] for row in rows] for c in FRAMES["trends"]})


def trend_row(source: Source) -> dict[str, object]:
    """What one run contributes to the trends."""
    outcomes: list[str] = []
    signatures: set[str] = set()
    lengths: list[int] = []
    accept: list[AcceptLengths | None] = []
    for case in source.cases():
        outcomes.append(str(case.verdict.outcome if case.verdict is not None else Outcome.UNKNOWN))
        signatures |= {found.signature for found in group(case.findings) if found.is_root}
        lengths += accept_lengths(case)
        accept.append(accept_rounds(case).all())
    verdict, spread = source.verdict, pd.Series(lengths, dtype="float64")
    known = total(accept)
    choices = sum(verdict.compared.get(name, 0) for name in CHOICES)
    return {
        "run": source.name,
        "created": "" if source.manifest is None else source.manifest.created,
        "engine": source.release,
        "device": source.device,
        "verdict": str(verdict.outcome),
        "scenarios": len(outcomes),
        "failed": outcomes.count("FAIL"),
        "unknown": outcomes.count("UNKNOWN"),
        "signatures": len(signatures),
        "positions": verdict.compared.get("positions", 0),
        "choices": choices,
        "ties": verdict.ties,
        "tie_rate": verdict.ties / choices if choices else float("nan"),
        "verifies": len(lengths),
        "accept_mean": float(spread.mean()),
        "accept_std": float(spread.std()),
        "expected_mean": float("nan") if known is None else known.mean_expected,
        "lost_percent": float("nan") if known is None else known.lost,
    }


def finding_frame(case: StoredScenario, *, run: str) -> pd.DataFrame:
    """One row a divergence, in order of time."""
    found = case.findings
    return frame(
        "findings",
        {
            **_case(case, run),
            **{name: [str(getattr(one, name)) for one in found] for name in ("signature", "kind", "check", "policy")},
            **{name: [getattr(one.key, name) for one in found] for name in _KEY},
            "round": [one.round for one in found],
            "expected": [_json(one.expected) for one in found],
            "observed": [_json(one.observed) for one in found],
            "margin": [float("nan") if one.margin is None else one.margin for one in found],
            "hint": [one.hint for one in found],
            "first": [one.first for one in found],
            "cause": [one.cause for one in found],
        },
    )


def round_frame(case: StoredScenario, *, run: str) -> pd.DataFrame:
    """One row for each request of each batch, in order of time; a batch without requests has one with an empty rid."""
    roots, follow = _by_part(case.findings, roots=True), _by_part(case.findings, roots=False)
    rows = []
    for record in leading_rounds(case.engine):
        shared = _of_record(record)
        for rid, attempt, start, length, final in _parts(record):
            place = (record.dp_rank, record.index, rid)
            counts = {"roots": roots.get(place, 0), "consequences": follow.get(place, 0)}
            own = {"rid": rid, "attempt": attempt, "committed": start, "length": length, "final": final}
            rows.append({**shared, **own, **counts})
    names = [c.name for c in FRAMES["rounds"]][3:]
    return frame("rounds", {**_case(case, run), **{name: [row[name] for row in rows] for name in names}})


def coverage_frame(case: StoredScenario, *, run: str) -> pd.DataFrame:
    """One row for each coverage point that the verdict counted; none for a scenario without a verdict."""
    verdict = case.verdict
    if verdict is None:
        return empty("coverage")
    names = list(verdict.coverage)
    return frame(
        "coverage",
        {
            **_case(case, run),
            "coverage_point": names,
            "asked": [name in case.scenario.wants for name in names],
            "times": [verdict.coverage[name] for name in names],
            "positions": [verdict.inside.get(name, 0) for name in names],
        },
    )


def accept_frame(case: StoredScenario, rounds: pd.DataFrame) -> pd.DataFrame:
    """One row a verify: the DECODE rows of the rounds frame in which the request took part in one."""
    expected = accept_rounds(case).expected
    kept = rounds[(rounds["mode"] == "DECODE") & (rounds["length"] > 0) & (rounds["rid"] != "")]
    spec = case.scenario.spec
    same = ("run", "scenario", "scenario_id", "dp_rank", "rid", "attempt", "committed", "round")
    return frame(
        "accept_lengths",
        {
            **{name: kept[name].tolist() for name in same},
            "accept_len": kept["length"].tolist(),
            "expected_len": [expected.get(share) for share in zip(*(kept[name] for name in SHARE), strict=True)],
            **{
                name: [getattr(spec, name)] * len(kept)
                for name in ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
            },
        },
    )


def accept_rounds(case: StoredScenario) -> AcceptRounds:
    """Expected and observed accept lengths of every verify."""
    return AcceptRounds.of(case.scenario, case.engine, case.reference, case.findings)


def accept_lengths(case: StoredScenario) -> list[int]:
    """Tokens committed by each verify of each request, in order of time."""
    decoded = (record for record in leading_rounds(case.engine) if record.mode == "DECODE")
    return [length for record in decoded for length in record.lens if length]


_KEY = ("dp_rank", "rid", "attempt", "committed", "phase", "step", "slot")


def _case(case: StoredScenario, run: str) -> dict[str, str]:
    return {"run": run, "scenario": case.scenario.name, "scenario_id": case.scenario.id}


def _json(value: object) -> str:
    return json.dumps(plain(value), sort_keys=True)


def _of_record(record: RoundRecord) -> dict[str, object]:
    forwards = record.forwards
    return {
        "dp_rank": record.dp_rank,
        "round": record.index,
        "scheduler_step": record.scheduler_step,
        "mode": record.mode,
        "batch": len(record.rids),
        "draft_forwards": forwards.get("DRAFT", 0),
        "verify_forwards": forwards.get("VERIFY", 0),
        "extend_forwards": forwards.get("EXTEND", 0),
        "graphs": " ".join(f"{phase}={size}" for phase, size in sorted(record.graphs.items())),
    }


def _parts(record: RoundRecord) -> Sequence[tuple[str, int, int, int, bool]]:
    """(rid, attempt, start, length, final) of each request; one empty part for a batch without requests."""
    if not record.rids:
        return [("", 0, -1, 0, False)]
    return list(zip(record.rids, record.attempts, record.starts, record.lens, record.final, strict=True))


def _by_part(found: Iterable[Divergence], *, roots: bool) -> dict[tuple[int, int, str], int]:
    """(dp_rank, round, rid) -> divergences there."""
    counts: dict[tuple[int, int, str], int] = {}
    for one in found:
        if roots is not bool(one.cause):
            place = (one.key.dp_rank, one.round, one.key.rid)
            counts[place] = counts.get(place, 0) + 1
    return counts
