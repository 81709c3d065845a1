"""`eaglecheck diff`: what changed between two stored runs. Judges nothing and runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.archive.run_folders import whole
from harness.cli import options
from harness.cli.outcome import Exit, guarded
from harness.contract.outputs import check_target, write_json


@guarded
def command(
    before: Annotated[
        Path,
        typer.Argument(metavar="BEFORE", help="The run to start from: a run folder, a scenario's or a reproducer's."),
    ],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The run to compare with it.")],
    json: options.Json = None,
) -> Exit:
    """Show what changed between two stored runs.

    Compares verdicts, findings by signature, coverage and accepted lengths.

    Exits 0 if no verdict changed and no finding came or went, 1 if one did, better or worse, and 3 if that cannot be
    said: a run that was cut off, no scenario in common, or one that neither run could judge.
    """
    console = Console(stderr=json == "-")
    check_target(json, runs=[whole(before), whole(after)])
    from reports.diff import compare, diff_document, render_diff  # pandas: a usage error need not wait for it
    from reports.reading import read_report

    found = compare(read_report(before), read_report(after))
    render_diff(console, found)
    write_json(diff_document(found), json)
    return Exit.DIVERGENCE if found.differs else Exit.UNKNOWN if found.open else Exit.PASS
