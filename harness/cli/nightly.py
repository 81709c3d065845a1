"""`eaglecheck matrix --nights`: drives a night or one shard of it, keeps it, and judges a whole one.

It must not start an engine before everything that can be refused was refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cases import known
from harness.cli import prepare
from harness.cli.night import check_store, conclude, now, past_of, today
from harness.cli.night_plan import Asked, ahead, checked_cells, planned, resumed, share_of
from harness.cli.outcome import Exit, kept, typed_again
from harness.contract.outputs import writable, write_json
from harness.contract.words import counted
from harness.night import document, store
from harness.night.jobs import Setup, drive
from harness.night.judge import judge
from harness.night.records import CellResult, Night, NightPlan
from harness.night.text import render_cell
from reports.prose import say


def run_night(asked: Asked, *, console: Console, json: str | None) -> Exit:
    """The whole of it. Exits 0 for a green night, 1 or 3 for a red one; a shard is not judged and exits 0."""
    entries = known.read(asked.known)
    shard = prepare.shard_of(asked.shard)
    prepare.check_device(asked.device)
    lease = prepare.gpu_lease(asked.device, asked.gpu_share)
    cells, left_out = checked_cells(asked)
    todo = planned(asked, cells, left_out, shard)
    check_store(asked.nights)
    writable(asked.nights, option="nights")
    results: dict[str, CellResult] = {}
    if asked.resume is not None:
        todo = resumed(asked.nights, asked.resume, todo)
        held = store.hold(asked.nights / todo.id)
        results = store.done(asked.nights / todo.id)
    share = [cell for cell in cells if cell.key in {*todo.mine} and cell.key not in results]
    versions, told = dict.fromkeys(cell.engine for cell in share), partial(say, console)
    environments = {version: prepare.engine_environment(version, told) for version in versions}
    folder = store.begin(asked.nights, todo, again=asked.resume is not None)
    if asked.resume is None:
        held = store.hold(folder)
    say(console, f"night {todo.id}: {share_of(todo)}, seed {todo.seed}; kept in {folder}")
    say(console, ahead(share, jobs=todo.jobs), style="dim")
    for line in todo.not_planned:
        say(console, f"not planned: {line}", style="dim")

    setup = Setup(
        environments=environments,
        folder=folder,
        device=asked.device,
        revert=asked.revert,
        repeats=asked.repeats,
        wanted=asked.wanted,
        lease=lease,
        ahead=_ahead(asked),
    )

    def done(result: CellResult) -> None:
        results[result.key] = result
        store.add(folder, result)
        render_cell(console, result)

    def left() -> str:
        return _left(folder, todo, done=len(results), seeded=asked.seed is not None)

    with held, kept(json, lambda _stop: _by_now(results, todo, asked.nights, entries), left=left):
        drive(setup, share, jobs=asked.jobs, done=done)
    night = Night(plan=todo, finished=now(), cells=tuple(results[key] for key in todo.mine))
    store.finish(folder, night)
    if todo.shard[1] > 1:
        return _shard_done(asked, night, console=console, json=json)
    return conclude(folder, night, root=asked.nights, entries=entries, console=console, json=json)


def _ahead(asked: Asked) -> int:
    """Engines that each process boots ahead: beside others one is enough, unless somebody wants more."""
    if asked.boots_ahead is not None:
        return asked.boots_ahead
    most = prepare.ahead_on(asked.device)
    return most if asked.jobs == 1 else min(most, 1)


def _shard_done(asked: Asked, night: Night, *, console: Console, json: str | None) -> Exit:
    """A shard is kept and not judged."""
    write_json(document.shard_document(night.plan, night.cells), json)
    say(console, f"shard {asked.shard}: {counted(len(night.cells), 'cell')} driven, and not judged alone")
    again = f"eaglecheck night {asked.nights} --nights STORE"
    say(console, f"judge the whole night, once all shards are here:  {again}")
    return Exit.PASS


def _by_now(
    results: Mapping[str, CellResult], todo: NightPlan, root: Path, entries: Sequence[known.Entry]
) -> dict[str, Any]:
    """The cells that are done, judged as what they are: a part of a night."""
    done = tuple(results[key] for key in todo.mine if key in results)
    if todo.shard[1] > 1:
        return document.shard_document(todo, done)
    part = Night(plan=todo, finished=now(), cells=done)
    return document.document(judge(part, past=past_of(root, part)[1], known=entries, today=today()))


def _left(folder: Path, todo: NightPlan, *, done: int, seeded: bool) -> str:
    """What an interrupted night leaves behind, and how to have the same one again."""
    again = typed_again(more=(*(() if seeded else ("--seed", str(todo.seed))), "--resume", todo.id))
    what = "night" if todo.shard[1] == 1 else "shard"
    return (
        f"the {what} {todo.id} never finished, {done} of {counted(len(todo.mine), 'cell')} driven: {folder} has no "
        f"{store.NIGHT}, and counts for nothing\n  drive the others:  {again}"
    )
