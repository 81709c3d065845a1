"""A judged night for machines: the JSON of `eaglecheck night --json`, and JUnit with properties.

It must not judge: every value comes from a judgement.
"""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

from harness.contract.types import Outcome
from harness.night.judge import Group, Judgement
from harness.night.records import CellResult, NightPlan
from harness.night.text import how_often, since
from harness.night.trends import Trend

NIGHT_SCHEMA = 1
#: What XML 1.0 cannot hold, not even escaped.
UNWRITABLE = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def document(judged: Judgement) -> dict[str, Any]:
    """JSON-ready; described in docs/nightly.md."""
    night = judged.night
    return {
        "schema": NIGHT_SCHEMA,
        "night": night.plan.id,
        "outcome": str(judged.outcome),
        "green": judged.outcome is Outcome.PASS,
        "baseline": judged.baseline,
        "device": night.plan.device,
        "revert": night.plan.revert,
        "seed": night.plan.seed,
        "planned": len(night.plan.planned),
        "reported": len(night.cells),
        "not_planned": list(night.plan.not_planned),
        "wrong": list(judged.wrong),
        "incomplete": list(judged.incomplete),
        "findings": [_group(group) for group in judged.groups],
        "trends": [_trend(trend) for trend in judged.trends],
        "cells": [cell.model_dump(mode="json") for cell in night.cells],
    }


def shard_document(plan: NightPlan, cells: Sequence[CellResult]) -> dict[str, Any]:
    """What one shard drove, which is not judged alone: no outcome, and nothing that needs the other cells."""
    return {
        "schema": NIGHT_SCHEMA,
        "night": plan.id,
        "shard": list(plan.shard),
        "device": plan.device,
        "revert": plan.revert,
        "seed": plan.seed,
        "planned": len(plan.mine),
        "reported": len(cells),
        "cells": [cell.model_dump(mode="json") for cell in cells],
    }


def _group(group: Group) -> dict[str, Any]:
    rate, low, high = group.rate
    plain = {**dataclasses.asdict(group), "status": str(group.status), "cells": list(group.cells)}
    return {**plain, "rate": rate, "interval": [low, high]}


def _trend(trend: Trend) -> dict[str, Any]:
    plain = dataclasses.asdict(trend)
    before = plain.pop("before") or {"mean": None, "deviation": None, "nights": 0}
    return {**plain, **before}


def junit(judged: Judgement) -> str:
    """One test case a cell, and one for the night itself: its count, its known entries.

    A cell fails only with what is new or flaky in it, so that the file says what the gate says.
    """
    night = judged.night
    cases = [_cell(cell, judged) for cell in night.cells] + [_whole(judged)]
    counts: dict[str, Any] = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
    }
    suite = ET.Element("testsuite", name=f"night {night.plan.id}", timestamp=night.plan.created, **counts)
    of = {name: getattr(night.plan, name) for name in ("device", "revert", "seed", "git_head", "host")}
    _properties(suite, {name: value for name, value in of.items() if value is not None})
    suite.extend(cases)
    root = ET.Element("testsuites", **counts)
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _cell(cell: CellResult, judged: Judgement) -> ET.Element:
    case = ET.Element("testcase", classname=f"{cell.engine}.{cell.kind}", name=cell.name, time=f"{cell.seconds:.1f}")
    groups = [group for group in judged.groups if cell.key in group.cells]
    _properties(
        case,
        {
            "verdict": cell.verdict,
            "scenarios": cell.scenarios,
            "unknown": cell.unknown,
            "left_out": cell.left_out,
            "accept_length": "" if cell.mean_accepted is None else f"{cell.mean_accepted:.4f}",
            "accept_lost_percent": "" if cell.lost is None else f"{cell.lost:.2f}",
            "tie_rate": "" if cell.tie_rate is None else f"{cell.tie_rate:.6f}",
            **{f"{group.status}:{group.signature}": f"{group.shown}/{group.tried}" for group in groups},
        },
    )
    bad = [group for group in groups if group.red]
    if bad:
        signatures = ", ".join(f"{group.status} {group.signature}" for group in bad)
        text = "\n\n".join(
            f"{group.first}\n{how_often(group)}; {since(group, judged.night)}{_replay(group, judged)}" for group in bad
        )
        _said(case, "failure", signatures, text)
    wrong = [said for said in (*judged.wrong, *judged.incomplete) if _names(said, cell.key)]
    if wrong and not bad:
        _said(case, "error", wrong[0], "\n".join(wrong))
    return case


def _names(sentence: str, key: str) -> bool:
    """Whether a sentence is about this cell, and not about one whose key only begins like it."""
    return re.search(re.escape(key) + r"(?![\w/-])", sentence) is not None


def _whole(judged: Judgement) -> ET.Element:
    case = ET.Element("testcase", classname="night", name="gate", time="0")
    said = [*judged.wrong, *judged.incomplete]
    if said:
        _said(case, "failure" if judged.wrong else "error", said[0], "\n".join(said))
    return case


def _replay(group: Group, judged: Judgement) -> str:
    return f"\nrun it again:  eaglecheck replay {judged.night.plan.id}/{group.reproducer}" if group.reproducer else ""


def _said(case: ET.Element, tag: str, message: str, text: str) -> None:
    ET.SubElement(case, tag, message=_clean(message.splitlines()[0])).text = _clean(text)


def _properties(parent: ET.Element, values: dict[str, Any]) -> None:
    box = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(box, "property", name=name, value=_clean(str(value)))


def _clean(text: str) -> str:
    return UNWRITABLE.sub("?", text)
