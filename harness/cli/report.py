"""`eaglecheck report`: a stored run as a page, as Markdown, as CSV and as Parquet. Judges nothing and runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from harness.cli.documents import check_target
from harness.cli.outcome import Exit, guarded
from harness.cli.places import check_folder
from harness.cli.shown import Matrix, Mutants
from harness.contract import plain_files
from harness.contract.strict_json import NotJSON, parsed
from harness.contract.usage import UsageError
from harness.contract.validation import Unfit, validated
from harness.night import store
from reports.prose import say

if TYPE_CHECKING:
    from harness.night.charts import Trends

#: What the page reads of it.
READ: dict[str, type[BaseModel]] = {"matrix": Matrix, "mutants": Mutants}
#: A key that only that document has, by the option that takes it.
KNOWN_BY = {"matrix": "cells", "mutants": "mutants"}
HOW = {"matrix": "eaglecheck matrix --engines 0.5.11,0.5.23 --cases pr25015", "mutants": "eaglecheck mutants"}


@guarded
def command(
    run: Annotated[Path, typer.Argument(help="A run folder, or one scenario's or specimen's folder in it.")],
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one page that opens from disk, with nothing to fetch.")
    ] = None,
    markdown: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write text for an issue or pull request; '-': standard output."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every frame of docs/frames.md as DIR/<frame>.csv.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every frame of docs/frames.md as DIR/<frame>.parquet.")
    ] = None,
    matrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show what `matrix --json FILE` wrote in the page as well.")
    ] = None,
    mutants: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show what `mutants --json FILE` wrote in the page as well.")
    ] = None,
    nights: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Show accept lengths and tie rates of this store of nights too.")
    ] = None,
) -> Exit:
    """Write what RUN found, in any of these forms.

    Verdicts are those the run ended with; `eaglecheck recheck` judges again. Exits 0 once everything is written,
    whatever the verdict.
    """
    if not any((html, markdown, csv, parquet)):
        raise UsageError(
            f"name what to write: --html FILE, --markdown FILE, --csv DIR or --parquet DIR\n"
            f"  for example:  eaglecheck report {run} --html report.html"
        )
    if html is None and (matrix or mutants or nights):
        name = "--matrix" if matrix else "--mutants" if mutants else "--nights"
        raise UsageError(f"{name} is shown in the page only\n  add a page to show it in:  --html report.html")
    for option, target in (("html", html), ("markdown", markdown)):
        check_target(target, what=option, inputs=(matrix, mutants))
    if html is not None and markdown is not None and Path(html).absolute() == Path(markdown).absolute():
        raise UsageError(
            f"--html and --markdown are one file: {html}\n  name two:  --html report.html --markdown report.md"
        )
    for option, folder in (("csv", csv), ("parquet", parquet)):
        if folder is not None:
            check_folder(folder, option=option, what="frames")
    console = Console(stderr="-" in (html, markdown))
    from harness.cli.report_files import write_csv, write_html, write_markdown, write_parquet
    from reports.page import Beside  # pandas: a usage error need not wait for it
    from reports.reading import read_report

    beside = Beside(matrix=_document(matrix, "matrix"), mutants=_document(mutants, "mutants"), trends=_trends(nights))
    report = read_report(run)
    for option, place in (("html", html), ("markdown", markdown), ("csv", csv), ("parquet", parquet)):
        _keep_out(run, option, None if place in (None, "-") else Path(str(place)))
    written = [
        *([] if html is None else write_html(report, html, beside=beside)),
        *([] if markdown is None else write_markdown(report, markdown)),
        *([] if csv is None else write_csv(report, csv)),
        *([] if parquet is None else write_parquet(report, parquet)),
    ]
    for line in written:
        say(console, line)
    if report.source.missing:
        say(console, report.source.missing, style="bold yellow")
    return Exit.PASS


def _keep_out(run: Path, option: str, place: Path | None) -> None:
    """UsageError for a place in the run that is read: its own files must stay what they are."""
    if place is not None and place.resolve().is_relative_to(run.resolve()):
        raise UsageError(f"--{option} {place}: that is inside the run itself\n  name a place outside {run}")


def _trends(root: Path | None) -> Trends | None:
    """Trends of the whole nights in a store that were judged; UsageError if it has none."""
    if root is None:
        return None
    from harness.night.charts import trends_of

    whole = [kept.night for kept in store.nights(root) if kept.night is not None and kept.night.judged is not None]
    if not whole:
        raise UsageError(
            f"--nights {root}: no night in it was judged\n"
            f"  make one:  eaglecheck matrix --nights {root} --engines 0.5.23 --cases pr25015"
        )
    return trends_of(whole)


def _document(path: Path | None, command: str) -> dict[str, Any] | None:
    """What another command wrote with --json; UsageError if it is something else."""
    if path is None:
        return None
    # never a command that would write over a file of another kind
    target = f"{command}.json" if path.exists() else path
    again = f"write it:  {HOW[command]} --json {target}"
    try:
        found = parsed(plain_files.named(path))
    except OSError as error:
        raise UsageError(f"--{command}: cannot read {path}: {error.strerror}\n  {again}") from error
    except NotJSON as error:
        raise UsageError(f"--{command}: {path} is not whole JSON ({error})\n  {again}") from error
    if not isinstance(found, dict) or found.get("schema") != 1 or not isinstance(found.get(KNOWN_BY[command]), list):
        keys = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise UsageError(
            f"--{command}: {path} is not what `eaglecheck {command} --json` writes (found: {keys})\n"
            f"  allowed: an object with schema 1 and a list {KNOWN_BY[command]!r}\n  {again}"
        )
    try:
        validated(found, READ[command])
    except Unfit as error:
        raise UsageError(f"--{command}: {path}: {error}\n  {again}") from error
    return found
