"""What a CI page shows of a night: a step summary that fits, and annotations.

GitHub drops a step summary that is larger than 1 MiB as a whole, and shows ten annotations of a kind a step. It must
not judge, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.contract.types import Outcome
from harness.contract.words import counted
from harness.night.judge import Group, Judgement, Status
from harness.night.text import COLUMNS, how_often, places, rows, since, verdict_line
from reports.prose import markdown_table

#: Bytes a step summary may have, of the 1 048 576 allowed; the rest is for what other steps of the job add to it.
BUDGET = 900_000
#: Annotations of one kind that a step shows; and red findings that a summary names before it describes them.
ANNOTATIONS = 10


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
    yield f"## {'🟢' if judged.outcome is Outcome.PASS else '🔴'} {cell(verdict_line(judged))}\n"
    where = f"`{night.plan.id}` {night.plan.where}"
    yield f"{where}; baseline: {judged.baseline or 'none yet'}\n"
    for sentence in (*judged.wrong, *judged.incomplete):
        yield f"- **{cell(sentence)}**"
    red = [group for group in judged.groups if group.red]
    for group in red[:ANNOTATIONS]:
        what = f"`{group.signature}` on {group.engine}{night.plan.taken_out}"
        yield f"- **{group.status}**: {what} in {cell(places(group))}; {since(group, night)}"
    if len(red) > ANNOTATIONS:
        yield f"- {len(red) - ANNOTATIONS} more below"
    yield _table(COLUMNS, rows(night.cells))
    yield from (_finding(group, judged) for group in red)
    for status in (Status.FIXED, Status.KNOWN):
        for group in judged.of(status):
            engine = f"{group.engine}{night.plan.taken_out}"
            yield f"- {status}: `{group.signature}` on {engine} in {cell(places(group))}; {cell(group.why)}"
    moved = [trend for trend in judged.trends if trend.moved and trend.before is not None]
    if moved:
        lines = [
            (trend.cell, trend.what, f"{trend.tonight:.4f}", f"{trend.before.mean:.4f} ± {trend.before.deviation:.4f}")
            for trend in moved
            if trend.before is not None
        ]
        yield _table(("moved", "value", "tonight", "green nights"), lines)


def _finding(group: Group, judged: Judgement) -> str:
    lines = [
        f"\n### {group.status}: `{group.signature}` on {group.engine}{judged.night.plan.taken_out}\n",
        f"in {cell(places(group))}; {how_often(group)}; {since(group, judged.night)}\n",
        "```text",
        group.first.replace("```", "'''"),
        "```",
    ]
    if group.reproducer is not None:
        name = f"{judged.night.plan.id}/{group.reproducer}"
        lines.append(f"\nUnpack the artifact, then: `eaglecheck replay {name}`\n")
    return "\n".join(lines)


def _table(titles: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    return f"\n{markdown_table(titles, [[*map(cell, line)] for line in lines])}\n"


def cell(text: str) -> str:
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
