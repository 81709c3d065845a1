"""What the events of a trace say of a drive that ended early: a crash, a hang, or an engine that somebody ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.contract.trace import RoundRecord


def side_of(handshake: Mapping[str, Any]) -> dict[str, str]:
    """What an event says of the side it is of; empty where there is only one."""
    return {"side": handshake["side"]} if "side" in handshake else {}


def crash_data(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "site": report.get("site", "unknown"),
        "line": report.get("line", -1),
        "error": report.get("error", ""),
        "trace": report.get("trace", ""),
        "phase": report.get("at_phase", "IDLE"),
        "round": report.get("at_round", -1),
        "step": report.get("at_step", 0),
        "rids": report.get("at_rids", []),
        "dp_rank_reported": report.get("dp_rank", 0),
        "tp_rank": report.get("tp_rank", 0),
        **{name: report[name] for name in ("lacks", "unbuilt") if name in report},
        **side_of(report),
    }


def lost_data(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": report["what"],
        "phase": report.get("at_phase", "IDLE"),
        "round": report.get("at_round", -1),
        "dp_rank_reported": report.get("dp_rank", 0),
        **side_of(report),
    }


def hang_data(report: dict[str, Any], rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """As for a crash: where the stuck rank was, and where every other one.

    Of a rank that is silent: the last forward of the last batch that it reported.
    """
    rank = report.get("dp_rank", 0)
    reported = [record for record in rounds if record.dp_rank == rank and record.forwards]
    last = {"phase": list(reported[-1].forwards)[-1], "round": reported[-1].index} if reported else {}
    known = {"phase": report.get("at_phase"), "round": report.get("at_round"), "step": report.get("at_step")}
    found = {name: value for name, value in known.items() if value is not None}
    return {**report, **last, **found, "dp_rank_reported": rank}
