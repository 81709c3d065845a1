"""`eaglecheck night`: shards put together and judged, or the newest night of a store judged again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cases import known
from harness.archive.store import WriteError
from harness.cli import options
from harness.cli.night_verdict import check_store, conclude
from harness.cli.outcome import Exit, guarded
from harness.contract.outputs import check_target, writable
from harness.contract.usage import UsageError
from harness.night import store
from harness.night.ci import BUDGET, summary, workflow_commands
from harness.night.document import junit
from harness.night.judge import Judgement
from harness.night.merge import merge
from harness.night.records import Night
from harness.night.store import Kept


@guarded
def command(
    shards: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[SHARDS]...",
            help="Folders of shards, or folders they lie in. None: the newest night of the store.",
        ),
    ] = None,
    nights: Annotated[Path, typer.Option(help="The store: a folder of past nights.")] = Path("nights"),
    known_file: options.Known = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file.")] = None,
    summary_file: Annotated[
        Path | None, typer.Option("--summary", help="Add Markdown to this file, for example $GITHUB_STEP_SUMMARY.")
    ] = None,
    annotate: Annotated[bool, typer.Option("--annotate", help="Print GitHub's annotation commands too.")] = False,
    json: options.Json = None,
) -> Exit:
    """Judge a night: what is new, known, fixed or flaky.

    A night of which not all was seen is incomplete, and red.

    Exits 0 for a green night, 1 for a red one with something wrong, 3 for a red one that is incomplete.
    """
    console = Console(stderr=json == "-")
    read = [part for folder in shards or [nights] for part in store.parts(folder)]
    for option, target in (("json", json), ("junit", junit_file), ("summary", summary_file)):
        check_target(target, option=option, runs=read, piped=option == "json")
    check_store(nights)
    entries = known.read(known_file)
    if shards:
        writable(nights, option="nights")
        folder, night = merge(_found(shards), root=nights, now=datetime.now(UTC).isoformat())
        whole = True
    else:
        folder, night, whole = _newest(nights)

    def also(judged: Judgement) -> None:
        if junit_file is not None:
            with _output("junit", junit_file):
                junit_file.write_text(junit(judged))
        if summary_file is not None:
            _add_summary(summary_file, judged)
        for line in workflow_commands(judged) if annotate else []:
            sys.stdout.write(f"{line}\n")

    return conclude(folder, night, root=nights, entries=entries, console=console, json=json, also=also, keep=whole)


def _found(shards: list[Path]) -> list[Kept]:
    """Every shard in the folders that were named; one that holds none is an error."""
    found = []
    for folder in shards:
        inside = store.parts(folder)
        for half in store.torn(folder):
            raise UsageError(
                f"{half} holds {store.NIGHT} and no {store.PLAN}: only a part of that shard is here\n"
                "  unpack its artifact again, both files and reproducers"
            )
        if not inside:
            why = "holds no shard of a night" if folder.is_dir() else "is no folder"
            raise UsageError(
                f"{folder} {why}\n  make one in a new folder:  eaglecheck matrix --nights shards --shard 1/2 --seed 7 "
                "--engines 0.5.23 --cases pr25015,pr26329"
            )
        found += inside
    return [store.read(path) for path in dict.fromkeys(path.resolve() for path in found)]


def _newest(root: Path) -> tuple[Path, Night, bool]:
    """The newest night of a store, and whether it is whole; one that never finished is judged as what it is."""
    found = store.nights(root)
    if not found:
        raise UsageError(
            f"there is no night in {root}\n"
            f"  make one:  eaglecheck matrix --nights {root} --engines 0.5.23 --cases pr25015\n"
            f"  or name another store:  eaglecheck night --nights FOLDER"
        )
    last = found[-1]
    if last.plan.shard[1] > 1:
        raise UsageError(f"{last.folder} is one shard\n  judge all of them:  eaglecheck night {root} --nights STORE")
    if last.night is not None:
        return last.folder, last.night, True
    faults = (f"this night {last.plan.cut_off}",)
    return last.folder, Night(plan=last.plan, finished=datetime.now(UTC).isoformat(), cells=(), faults=faults), False


def _add_summary(path: Path, judged: Judgement) -> None:
    """After what is there already, inside the budget of them together."""
    there = path.stat().st_size if path.exists() else 0
    with _output("summary", path), path.open("a") as file:
        file.write(summary(judged, budget=max(BUDGET - there, 0)))


@contextlib.contextmanager
def _output(option: str, path: Path) -> Iterator[None]:
    """The night is kept and judged by then: only this file is missing."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"--{option} {path} cannot be written: {error.strerror}\n"
            f"  the night itself is kept; make room, or name another place and judge it again:  --{option} FILE"
        ) from error
