"""`eaglecheck night`: shards put together and judged, or the newest night of a store judged again, and kept."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cases import known
from harness.archive.faults import WriteError
from harness.cli import options
from harness.cli.outcome import BY_OUTCOME, Exit, guarded
from harness.contract.outputs import check_named, check_target, writable, write_json
from harness.contract.usage import UsageError
from harness.contract.words import counted
from harness.night import document, store
from harness.night.judge import Judgement, judge
from harness.night.merge import merge
from harness.night.records import Judged, Night
from harness.night.store import Kept
from harness.night.text import render_night
from reports.prose import say


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
        folder, night = merge(_found(shards), root=nights, now=now())
        whole = True
    else:
        folder, night, whole = _newest(nights)

    def also(judged: Judgement) -> None:
        if junit_file is not None:
            with _output("junit", junit_file):
                junit_file.write_text(document.junit(judged))
        if summary_file is not None:
            _add_summary(summary_file, judged)
        for line in document.workflow_commands(judged) if annotate else []:
            sys.stdout.write(f"{line}\n")

    return conclude(folder, night, root=nights, entries=entries, console=console, json=json, also=also, keep=whole)


def _found(shards: list[Path]) -> list[Kept]:
    """Every shard in the folders that were named; one that holds none is an error."""
    found = list[Kept]()
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
        found += _of_one_night(folder, [store.read(path) for path in inside])
    return [*{one.folder.resolve(): one for one in found}.values()]


def _of_one_night(folder: Path, inside: list[Kept]) -> list[Kept]:
    whole = [one for one in inside if one.plan.shard[1] == 1]
    if len(whole) > 1:
        raise UsageError(
            f"{folder} is a folder of {len(whole)} nights, and shards of one night are put together\n"
            f"  judge the newest of them:  eaglecheck night --nights {whole[-1].folder.parent}"
        )
    return inside


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
    cells = tuple(store.done(last.folder).values())
    if store.driven(last.folder):
        driven = f"{len(cells)} of {counted(len(last.plan.mine), 'cell')}"
        raise UsageError(
            f"the night {last.plan.id} is being driven, {driven} are done\n"
            "  wait until that ends, or name another store:  eaglecheck night --nights FOLDER"
        )
    faults = (f"this night {last.plan.cut_off}",)
    return last.folder, Night(plan=last.plan, finished=now(), cells=cells, faults=faults), False


def _add_summary(path: Path, judged: Judgement) -> None:
    """After what is there already, inside the budget of them together."""
    there = path.stat().st_size if path.exists() else 0
    with _output("summary", path), path.open("a") as file:
        file.write(document.summary(judged, budget=max(document.BUDGET - there, 0)))


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
    left = tuple(store.with_what_is_left(cell, folder) for cell in night.cells)
    judged = judge(night.model_copy(update={"cells": left}), past=past, known=entries, today=today())
    said = Judged(outcome=judged.outcome, reasons=judged.reasons)
    if keep and night.judged != said:  # what was said before is not written again: a store may be read-only
        store.finish(folder, night.model_copy(update={"judged": said}))
    render_night(console, judged, folder=folder, kept=keep)
    write_json(document.document(judged), json)
    also(judged)
    return BY_OUTCOME[judged.outcome]


def past_of(root: Path, night: Night) -> tuple[list[Kept], list[Night]]:
    """(nights begun before this one, those of them that were judged)."""
    earlier = [one for one in store.nights(root) if one.plan.created < night.plan.created]
    return earlier, store.judged(earlier)


def now() -> str:
    return datetime.now(UTC).isoformat()


def today() -> date:
    return datetime.now(UTC).date()
