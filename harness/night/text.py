"""A night for people: what is new, flaky, known and fixed, what moved, what is missing; the verdict comes last.

It must not judge, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.contract.types import Outcome
from harness.contract.words import brief, counted, percent, some
from harness.night.judge import Group, Judgement, Status
from harness.night.records import CellResult, Night
from reports.live import STYLE
from reports.prose import heading, say, table_of

#: Cells named in one line before "and N more".
SHOWN = 3
WHAT = {
    Status.NEW: "new findings",
    Status.FLAKY: "flaky findings: the same scenario does not always show them",
    Status.KNOWN: "known findings",
    Status.FIXED: "fixed: gone since the last night that ran these cells",
}


def render_cell(console: Console, cell: CellResult) -> None:
    """One line when a cell is done."""
    found = f"; {', '.join(seen.signature for seen in cell.findings)}" if cell.findings else ""
    left = f", {cell.left_out} left out" if cell.left_out else ""
    driven = counted(cell.scenarios, "scenario")
    boots = f" (of them {cell.waited:.1f} s {counted(cell.boots, 'boot')})" if cell.boots else ""
    say(console, f"{cell.verdict:7} {cell.key}  {driven}{left}, {cell.seconds:.1f} s{boots}{found}")
    for reason in cell.reasons:
        say(console, f"        no verdict: {brief(reason)}")


def render_night(console: Console, judged: Judgement, *, folder: Path, kept: bool = True) -> None:
    """Everything; folder: where the night lies; kept: whether it is a night there, which counts for later ones."""
    night = judged.night
    heading(console, f"night {night.plan.id} {night.plan.where}")
    _table(console, night.cells)
    if boots := sum(cell.boots for cell in night.cells):
        waited, every = (sum(getattr(cell, name) for cell in night.cells) for name in ("waited", "seconds"))
        say(console, f"{counted(boots, 'engine boot')}, {waited:.0f} of {every:.0f} s ({percent(waited, every)})")
    say(console, f"compared with: {judged.baseline or f'nothing, since {judged.uncompared}'}")
    for status, title in WHAT.items():
        groups = judged.of(status)
        if groups:
            heading(console, title)
        if status is Status.KNOWN:
            _known(console, groups, night=night)
        else:
            for group in groups:
                render_group(console, group, night=night, folder=folder)
    _trends(console, judged)
    left_out = night.plan.not_planned
    for title, sentences in (("not planned", left_out), ("wrong", judged.wrong), ("incomplete", judged.incomplete)):
        if sentences:
            heading(console, title)
        for sentence in sentences:
            say(console, f"  {sentence}")
    say(console)
    if kept:
        say(console, f"kept in {folder}")
    else:
        say(
            console,
            f"{folder} has no night.json, and counts for nothing; its reproducers are those of the cells driven",
        )
    say(console, verdict_line(judged), style=STYLE[judged.outcome])


def _known(console: Console, groups: Sequence[Group], *, night: Night) -> None:
    """What each is known as, once, and under it where it showed."""
    for why in dict.fromkeys(group.why for group in groups):
        say(console, f"  {why}", style="bold")
        for group in groups:
            if group.why == why:
                say(console, f"    {group.engine}{night.plan.taken_out}  {group.signature} in {places(group)}")


def render_group(console: Console, group: Group, *, night: Night, folder: Path) -> None:
    """Signature, places, how often, since when; for what is not known also the first place and the command."""
    say(console, f"  {group.signature} on {group.engine}{night.plan.taken_out}", style="bold")
    say(console, f"    in {places(group)}")
    if group.why:
        say(console, f"    {group.why}")
    if group.red:
        say(console, f"    {how_often(group)}; {since(group, night)}")
        for line in group.first.splitlines():
            say(console, f"    {line}")
        if group.reproducer is not None:
            say(console, f"    run it again:  eaglecheck replay {folder / group.reproducer}")


def places(group: Group) -> str:
    """The cells without the release, the first few."""
    return some([cell.partition("/")[2] for cell in group.cells], SHOWN)


def how_often(group: Group) -> str:
    """'shown 2 of 3 times: 67 %, with 95 % confidence 9 to 99 %'."""
    rate, low, high = group.rate
    text = f"shown {group.shown} of {counted(group.tried, 'time')}"
    return f"{text}: {100 * rate:.0f} %, with 95 % confidence {100 * low:.0f} to {100 * high:.0f} %"


def since(group: Group, night: Night) -> str:
    return "first seen tonight" if group.since == night.plan.id else f"first seen in {group.since}"


def verdict_line(judged: Judgement) -> str:
    """One sentence that begins with GREEN or RED."""
    counts = {status: len(judged.of(status)) for status in Status}
    found = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status]) or "no findings"
    cells = counted(len(judged.night.cells), "cell")
    if judged.outcome is Outcome.PASS:
        return f"night GREEN{judged.night.plan.taken_out}: {cells}, {found}"
    why = [f"{len(judged.wrong)} wrong"] if judged.wrong else []
    why += [f"{len(judged.incomplete)} incomplete"] if judged.incomplete else []
    return f"night RED ({judged.outcome}){judged.night.plan.taken_out}: {', '.join([cells, found, *why])}"


def rows(cells: Sequence[CellResult]) -> list[tuple[str, ...]]:
    """One row a release and kind of cell: cells, scenarios, failed, unknown, left out, accept length, ties."""
    found: dict[tuple[str, str], list[CellResult]] = {}
    for cell in cells:
        found.setdefault((cell.engine, cell.kind), []).append(cell)
    return [(engine, kind, *_sums(members)) for (engine, kind), members in found.items()]


def _sums(cells: Sequence[CellResult]) -> tuple[str, ...]:
    verifies = sum(count for cell in cells for count in cell.accepted.values())
    accepted = sum(length * count for cell in cells for length, count in cell.accepted.items())
    choices, ties = sum(cell.choices for cell in cells), sum(cell.ties for cell in cells)
    return (
        str(len(cells)),
        str(sum(cell.scenarios for cell in cells)),
        str(sum(cell.failed for cell in cells)),
        str(sum(cell.unknown for cell in cells)),
        str(sum(cell.left_out for cell in cells)),
        f"{accepted / verifies:.2f}" if verifies else "-",
        percent(ties, choices, 2),
    )


COLUMNS = ("release", "kind", "cells", "driven", "failed", "unknown", "left", "accept", "ties")


def _table(console: Console, cells: Sequence[CellResult]) -> None:
    table = table_of(COLUMNS, right=COLUMNS[2:], gap=2)
    for row in rows(cells):
        table.add_row(*row)
    console.print(table)


def _trends(console: Console, judged: Judgement) -> None:
    tracked, moved = [trend.before for trend in judged.trends if trend.before is not None], judged.moved
    if tracked:
        nights = max(before.nights for before in tracked)
        say(console)
        say(console, f"accept lengths and tie rates: {tracking(len(tracked), nights, len(moved))}")
    if moved:
        heading(console, "moved: outside what the green nights showed (for information; it decides nothing)")
    for trend, before in moved:
        say(
            console,
            f"  {trend.what} of {trend.cell}: {trend.tonight:.4f}, before {before.mean:.4f} ± "
            f"{before.deviation:.4f} over {counted(before.nights, 'night')}",
        )


def tracking(values: int, nights: int, moved: int) -> str:
    """'8 values tracked over 6 green nights, 1 moved'."""
    return f"{counted(values, 'value')} tracked over {counted(nights, 'green night')}, {moved or 'none'} moved"
