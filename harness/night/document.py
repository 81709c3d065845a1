"""A judged night for machines and their pages: JSON, JUnit with properties, a step summary that fits, annotations.

GitHub drops a step summary that is larger than 1 MiB as a whole, and shows ten annotations of a kind a step. It must
not judge: every value comes from a judgement.
"""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from typing import Any

from harness.contract.types import Outcome
from harness.contract.words import counted
from harness.night.judge import Group, Judgement, Status
from harness.night.records import CellResult, NightPlan
from harness.night.text import COLUMNS, how_often, places, rows, since, verdict_line
from harness.night.trends import Trend
from reports.prose import markdown_table

NIGHT_SCHEMA = 1
#: Bytes a step summary may have, of the 1 048 576 allowed; the rest is for what other steps of the job add to it.
BUDGET = 900_000
#: Annotations of one kind that a step shows; and red findings that a summary names before it describes them.
ANNOTATIONS = 10
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
        "settings": night.plan.settings,
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
        "settings": plan.settings,
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


def summary(judged: Judgement, *, budget: int = BUDGET) -> str:
    """Markdown of at most `budget` bytes: the verdict, what makes it red, counts, then the rest as far as it fits."""
    kept: list[str] = []
    left_out = 0
    room = budget - len(_left(10**9).encode())
    for part in _parts(judged):
        size = len(part.encode()) + 1
        if size > room:
            left_out += 1
        else:
            kept.append(part)
            room -= size
    return "\n".join([*kept, *([_left(left_out)] if left_out else [])]) + "\n"


def _left(number: int) -> str:
    return f"_{counted(number, 'part')} more did not fit here; all of it is in the night's artifact, `night.json`._"


def _parts(judged: Judgement) -> Iterator[str]:
    """Most important first, so that what does not fit is what matters least."""
    night = judged.night
    yield f"## {'🟢' if judged.outcome is Outcome.PASS else '🔴'} {_one_line(verdict_line(judged))}\n"
    where = f"`{night.plan.id}` {night.plan.where}"
    yield f"{where}; baseline: {judged.baseline or f'none, since {judged.uncompared}'}\n"
    for sentence in (*judged.wrong, *judged.incomplete):
        yield f"- **{_one_line(sentence)}**"
    red = [group for group in judged.groups if group.red]
    for group in red[:ANNOTATIONS]:
        what = f"`{group.signature}` on {group.engine}{night.plan.taken_out}"
        yield f"- **{group.status}**: {what} in {_one_line(places(group))}; {since(group, night)}"
    if len(red) > ANNOTATIONS:
        yield f"- {len(red) - ANNOTATIONS} more below"
    yield _table(COLUMNS, rows(night.cells))
    yield from (_finding(group, judged) for group in red)
    for status in (Status.FIXED, Status.KNOWN):
        for group in judged.of(status):
            engine = f"{group.engine}{night.plan.taken_out}"
            yield f"- {status}: `{group.signature}` on {engine} in {_one_line(places(group))}; {_one_line(group.why)}"
    if judged.moved:
        lines = [
            (trend.cell, trend.what, f"{trend.tonight:.4f}", f"{before.mean:.4f} ± {before.deviation:.4f}")
            for trend, before in judged.moved
        ]
        yield _table(("moved", "value", "tonight", "green nights"), lines)


def _finding(group: Group, judged: Judgement) -> str:
    lines = [
        f"\n### {group.status}: `{group.signature}` on {group.engine}{judged.night.plan.taken_out}\n",
        f"in {_one_line(places(group))}; {how_often(group)}; {since(group, judged.night)}\n",
        "```text",
        group.first.replace("```", "'''"),
        "```",
    ]
    if group.reproducer is not None:
        name = f"{judged.night.plan.id}/{group.reproducer}"
        lines.append(f"\nUnpack the artifact, then: `eaglecheck replay {name}`\n")
    return "\n".join(lines)


def _table(titles: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    return f"\n{markdown_table(titles, [[*map(_one_line, line)] for line in lines])}\n"


def _one_line(text: str) -> str:
    """Text for one line of Markdown: no line breaks, no bars, no tags."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def workflow_commands(judged: Judgement) -> list[str]:
    """Workflow commands: what is red as errors, what is fixed or moved as notices; the last one counts the rest."""
    errors = [
        (
            f"{group.status} finding on {group.engine}{judged.night.plan.taken_out}",
            f"{group.signature} in {places(group)}",
        )
        for group in judged.groups
        if group.red
    ]
    errors += [("the gate", sentence) for sentence in (*judged.wrong, *judged.incomplete)]
    notices = [
        (f"fixed on {group.engine}{judged.night.plan.taken_out}", f"{group.signature} in {places(group)}")
        for group in judged.of(Status.FIXED)
    ]
    return [*_commands("error", errors), *_commands("notice", notices)]


def _commands(kind: str, said: list[tuple[str, str]]) -> list[str]:
    shown = said if len(said) <= ANNOTATIONS else said[: ANNOTATIONS - 1]
    lines = [f"::{kind} title={_escaped(title, property=True)}::{_escaped(text)}" for title, text in shown]
    more = len(said) - len(shown)
    return [*lines, *([f"::{kind} title=more::{more} more; see the step summary"] if more else [])]


def _escaped(text: str, *, property: bool = False) -> str:
    """A line break would end the command, and what follows it could be one."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if property else text
