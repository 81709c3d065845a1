"""`eaglecheck report`: a stored run as a page, as Markdown, as CSV and as Parquet. Judges nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from harness.archive.run_folders import whole
from harness.cli import options
from harness.cli.outcome import Exit, guarded
from harness.contract import plain_files
from harness.contract.json_files import BadDocument, parsed, validated
from harness.contract.outputs import check_folder, check_outside, check_target
from harness.contract.usage import UsageError
from harness.night import store
from reports.prose import say

if TYPE_CHECKING:
    from harness.night.records import Night
    from reports.reading import Report


class _Read(BaseModel):
    """What the page needs of a document that another command wrote; it may hold more (docs/json.md)."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Place(_Read):
    rid: str
    committed_len: int
    round: int
    phase: str
    step: int
    slot: int
    expected: Any
    observed: Any


class Cell(_Read):
    engine: str
    case: str
    revert: int | None
    verdict: Literal["PASS", "FAIL", "UNKNOWN"]
    expected: Literal["PASS", "FAIL", "unknown"]
    kinds: list[str]
    first: Place | None
    text_identical: bool | None


class Matrix(_Read):
    schema_version: Literal[1] = Field(alias="schema")
    cells: list[Cell]


class Mutant(_Read):
    id: str
    what: str
    verdict: str
    why: str | None
    killed_by: list[str]
    kinds: list[str]
    text_identical: bool | None


class Mutants(_Read):
    schema_version: Literal[1] = Field(alias="schema")
    engine: str
    verdict: Literal["PASS", "FAIL", "UNKNOWN"]
    mutants: list[Mutant]
    counted: int = 0
    counts: dict[str, int] = {}
    beside: dict[str, int] = {}
    by_file: dict[str, dict[str, int]] = {}
    by_operator: dict[str, dict[str, int]] = {}


READ: dict[str, type[BaseModel]] = {"matrix": Matrix, "mutants": Mutants}
#: The commands that write such a file.
HOW = {
    "matrix": ("eaglecheck matrix --engines 0.5.11,0.5.23 --cases pr25015",),
    "mutants": ("eaglecheck mutants", "eaglecheck mutate"),
}


@guarded
def command(
    run: options.Run,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one page that opens from disk, with nothing to fetch.")
    ] = None,
    markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write text for an issue or pull request; '-': standard output.")
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
        Path | None, typer.Option(metavar="FILE", help="Show what `mutants` or `mutate --json FILE` wrote too.")
    ] = None,
    nights: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Show accept lengths and tie rates of this store of nights too.")
    ] = None,
) -> Exit:
    """Write what a run found as HTML, Markdown, CSV or Parquet.

    Verdicts are those the run ended with; `eaglecheck recheck` judges again. Exits 0 once everything is written,
    whatever the verdict.
    """
    places: dict[str, str | Path | None] = {"html": html, "markdown": markdown, "csv": csv, "parquet": parquet}
    beside = {"matrix": matrix, "mutants": mutants, "nights": nights}
    _check_options(run, places, beside)
    console = Console(stderr="-" in (html, markdown))
    from harness.cli.report_files import write_csv, write_html, write_markdown, write_parquet
    from harness.night.trends import trends_of
    from reports.page import Beside  # pandas: a usage error need not wait for it
    from reports.reading import read_report

    judged = _judged(nights)
    report = read_report(run)
    shown = Beside(
        matrix=_document(matrix, "matrix"),
        mutants=_document(mutants, "mutants"),
        boards=[cell.board for cell in judged[-1].cells if cell.board] if judged else (),
        trends=trends_of(judged) if judged else None,
        first_seen=_first_seen(report, judged) if judged else None,
    )
    written = [
        *([] if html is None else write_html(report, html, beside=shown)),
        *([] if markdown is None else write_markdown(report, markdown)),
        *([] if csv is None else write_csv(report, csv)),
        *([] if parquet is None else write_parquet(report, parquet)),
    ]
    for line in written:
        say(console, line)
    if report.source.missing:
        say(console, report.source.missing, style="bold yellow")
    return Exit.PASS


def _check_options(run: Path, places: dict[str, str | Path | None], beside: dict[str, Path | None]) -> None:
    """UsageError or OutputError before anything is read."""
    html, markdown = places["html"], places["markdown"]
    if not any(places.values()):
        raise UsageError(
            f"name what to write: --html FILE, --markdown FILE, --csv DIR or --parquet DIR\n"
            f"  for example:  eaglecheck report {run} --html report.html"
        )
    if html is None and any(beside.values()):
        name = next(name for name, path in beside.items() if path)
        raise UsageError(f"--{name} is shown in the page only\n  add a page to show it in:  --html report.html")
    if html and markdown and Path(html).absolute() == Path(markdown).absolute():
        raise UsageError(
            f"--html and --markdown are one file: {html}\n  name two:  --html report.html --markdown report.md"
        )
    read = [whole(run), *(store.parts(beside["nights"]) if beside["nights"] else ())]
    for option, place in places.items():
        if place is None or place == "-":
            continue
        if option in ("html", "markdown"):
            check_target(place, option=option, inputs=beside.values(), runs=read)
        else:
            check_outside(Path(place), read, option=option)
            check_folder(Path(place), option=option)


def _first_seen(report: Report, judged: Sequence[Night]) -> dict[str, str]:
    from harness.night.records import first_seen

    source = report.source
    return first_seen(judged, release=source.release, device=source.device, revert=report.result.revert)


def _judged(root: Path | None) -> list[Night]:
    """The whole nights in a store that were judged, oldest first; UsageError if it has none."""
    if root is None:
        return []
    whole = store.judged(store.nights(root))
    if not whole:
        why = "no night in it was judged" if root.is_dir() else "there is no such folder"
        raise UsageError(
            f"--nights {root}: {why}\n  make one:  eaglecheck matrix --nights {root} --engines 0.5.23 --cases pr25015"
        )
    return whole


def _document(path: Path | None, command: str) -> dict[str, Any] | None:
    """What another command wrote with --json; UsageError if it is something else."""
    if path is None:
        return None
    # never a command that would write over a file of another kind
    target = f"{command}.json" if path.exists() else path
    again = "write it:  " + "\n  or:  ".join(f"{one} --json {target}" for one in HOW[command])
    try:
        found = parsed(plain_files.named(path))
        validated(found, READ[command])
    except OSError as error:
        raise UsageError(f"--{command}: cannot read {path}: {error.strerror}\n  {again}") from error
    except BadDocument as error:
        writers = " or ".join(f"`{' '.join(one.split()[:2])} --json`" for one in HOW[command])
        raise UsageError(f"--{command}: {path} is not what {writers} writes: {error}\n  {again}") from error
    assert isinstance(found, dict)
    return found
