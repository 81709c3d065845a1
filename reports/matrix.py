"""The table of `eaglecheck matrix`: one row a cell. It must not judge, and must not import torch or sglang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from cases.catalogue import outcome_of
from harness.contract.types import Outcome
from harness.contract.words import counted
from reports.live import STYLE
from reports.prose import heading, say, table_of

TEXT = {True: "identical", False: "differs", None: "-"}
#: A column for the first wrong place; on anything narrower it is left to the lines above the table.
PLACE, WIDE = "first wrong place", 120


def render_matrix(console: Console, cells: Sequence[dict[str, Any]]) -> None:
    """Verdict, what the release window says, kinds and text of every cell, then the verdict of all."""
    heading(console, "matrix")
    wide = console.width >= WIDE
    columns = ["engine", "case", "revert", "verdict", "expected", "kinds", "text", *([PLACE] if wide else [])]
    table = table_of(columns, folded=PLACE)
    for cell in cells:
        row = [cell["engine"], cell["case"], str(cell["revert"] or "-"), _verdict(cell), _expected(cell)]
        row += [" ".join(cell["kinds"]) or "-", TEXT[cell["text_identical"]]]
        table.add_row(*row, *([_place(cell["first"])] if wide else []))
    console.print(table)
    _sum_up(console, cells)


def _sum_up(console: Console, cells: Sequence[dict[str, Any]]) -> None:
    unforeseen = [cell for cell in cells if cell["as_expected"] is False]
    for cell in unforeseen:
        revert = f" with #{cell['revert']} reverted" if cell["revert"] else ""
        what = f"{cell['case']} on {cell['engine']}{revert}"
        other = f" by {', '.join(cell['kinds'])}" if cell["expected"] == cell["verdict"] else ""
        said = cell["expected"] if not other else "by the kinds of the case"
        say(console, f"not as expected: {what} is {cell['verdict']}{other}, not {said}", style="bold")
        for reason in cell["reasons"] if cell["verdict"] == Outcome.UNKNOWN else []:
            say(console, f"  because: {reason}")
    counts = Counter(cell["verdict"] for cell in cells)
    outcome = outcome_of(cells)
    each = ", ".join(f"{counts[name]} {name}" for name in Outcome if counts[name])
    agreed = "all as expected" if not unforeseen else f"{len(unforeseen)} not as expected"
    how = " (as expected)" if outcome is Outcome.PASS and counts[Outcome.FAIL] else ""
    say(console)
    say(console, f"verdict {outcome}{how}: {counted(len(cells), 'cell')}, {each}; {agreed}", style=STYLE[outcome])


def _verdict(cell: dict[str, Any]) -> Text:
    return Text(cell["verdict"], style=STYLE[Outcome(cell["verdict"])])


def _expected(cell: dict[str, Any]) -> Text:
    return Text(cell["expected"], style="bold" if cell["as_expected"] is False else "")


def _place(first: dict[str, Any] | None) -> str:
    if first is None:
        return "-"
    return (
        f"{first['rid']} at {first['committed_len']}, round {first['round']}, {first['phase']} "
        f"{first['step']}/{first['slot']}: {first['observed']}, not {first['expected']}"
    )
