"""A night judged against those before it: kept, printed, and written as JSON. It must not drive anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from rich.console import Console

from cases import known
from harness.cli.outcome import BY_OUTCOME, Exit
from harness.contract.outputs import check_named, write_json
from harness.contract.usage import UsageError
from harness.night import document, store
from harness.night.judge import Judgement, judge
from harness.night.records import CellResult, Judged, Night
from harness.night.store import Kept
from harness.night.text import render_night
from reports.prose import say


def check_store(root: Path) -> None:
    """UsageError or StoreError before hours are spent, for a store that could not be judged with after them."""
    check_named(root, option="nights")
    if root.exists() and not root.is_dir():
        raise UsageError(f"--nights {root}: that is not a folder\n  name a folder, there or not:  --nights nights")
    for half in store.torn(root, deep=False):
        raise UsageError(
            f"{half} holds {store.NIGHT} and no {store.PLAN}: what that night set out to do is not known\n"
            f"  put its {store.PLAN} back, or move it away to go on without it:  mv {half} {half.name}.torn"
        )
    store.nights(root)


def conclude(
    folder: Path,
    night: Night,
    *,
    root: Path,
    entries: Sequence[known.Entry],
    console: Console,
    json: str | None,
    also: Callable[[Judgement], None] = lambda _judged: None,
    keep: bool = True,
) -> Exit:
    """Judge a night, keep and print what was said. also: whatever else is written about it.

    keep: not one that never finished, which stays what it is: a plan, and no night.
    """
    earlier, past = past_of(root, night)
    for one in earlier:
        if one.night is None:
            say(console, f"an earlier night never finished, and counts for nothing: {one.plan.id}", style="dim")
    judged = judge(_with_what_is_left(night, folder), past=past, known=entries, today=today())
    said = Judged(outcome=judged.outcome, reasons=judged.reasons)
    if keep:
        store.finish(folder, night.model_copy(update={"judged": said}))
    render_night(console, judged, folder=folder, kept=keep)
    write_json(document.document(judged), json)
    also(judged)
    return BY_OUTCOME[judged.outcome]


def past_of(root: Path, night: Night) -> tuple[list[Kept], list[Night]]:
    """(nights begun before this one, those of them that were judged)."""
    earlier = [one for one in store.nights(root) if one.plan.created < night.plan.created]
    return earlier, [one.night for one in earlier if one.night is not None and one.night.judged is not None]


def _with_what_is_left(night: Night, folder: Path) -> Night:
    """The night without the names of reproducers that are gone: nobody can run those again."""

    def kept_in(cell: CellResult) -> CellResult:
        seen = [
            one
            if one.reproducer and (folder / one.reproducer).is_dir()
            else one.model_copy(update={"reproducer": None})
            for one in cell.findings
        ]
        return cell.model_copy(update={"findings": tuple(seen)})

    return night.model_copy(update={"cells": tuple(map(kept_in, night.cells))})


def today() -> date:
    return datetime.now(UTC).date()
