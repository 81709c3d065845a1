"""`eaglecheck replay`: run one stored scenario again on a live engine, and say whether its failure is still there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.archive.store import EVENTS, MANIFEST, read_reproducer, reproducers_in, started_with
from harness.cli import options, prepare, replay_untraced
from harness.cli.outcome import Exit, guarded
from harness.contract.usage import UsageError
from harness.driving.own_pair import own_pair
from harness.driving.runner import run
from reports.live import LiveLine
from reports.prose import say
from reports.replay import answer, render_replay

CODES = {"FAILED": Exit.DIVERGENCE, "FIXED": Exit.PASS, "ERROR": Exit.UNKNOWN}


@guarded
def command(
    reproducer: Annotated[
        Path, typer.Argument(metavar="REPRODUCER", help="A reproducer folder, as printed by a failing run.")
    ],
    engine: Annotated[
        str | None, typer.Option(help="Replay on this release, as published, instead of the reproducer's own.")
    ] = None,
    untraced: Annotated[
        bool, typer.Option("--untraced", help="Without our probe, for crashes, hangs and wrong texts only.")
    ] = False,
    bare: Annotated[
        bool, typer.Option("--bare", help="SGLang alone, none of our code in its processes, for the same; needs a GPU.")
    ] = False,
    reference: options.Replayed = None,
    gpu_share: options.GpuShare = None,
    runs: options.Runs = None,
) -> Exit:
    """Run one stored failure again: FAILED, FIXED or ERROR.

    Exits 1 if the same failure shows again (FAILED), 0 if it is gone (FIXED), 3 if that cannot be said (ERROR).
    """
    console = Console()
    if untraced and bare:
        raise UsageError("--untraced and --bare exclude each other\n  name one of them")
    _check_reproducer(reproducer, runs)
    manifest, stored = read_reproducer(reproducer)
    if bare:
        replay_untraced.check_bare(manifest.device, gpu=prepare.has_gpu())
    if untraced or bare:
        replay_untraced.check_seen("--bare" if bare else "--untraced", reproducer, manifest.signature)
    pair = manifest.header.get("pair")
    if gpu_share is not None and manifest.device == "cpu":
        raise UsageError(f"--gpu-share {gpu_share:g}: the reproducer is of an engine on a CPU\n  leave it out")
    assumed, attention = started_with(manifest, stored)
    plan = prepare.make_plan(
        [stored.scenario],
        say=lambda text: say(console, text),
        engine=engine or manifest.release,
        device=manifest.device,
        revert=manifest.header.get("revert") if engine is None else None,
        own=own_pair(*map(Path, pair)) if pair else None,
        reference=reference or str(manifest.header.get("reference", "auto")),
        gpu_share=gpu_share,
        runs=runs,
        cpu_attention=attention,
        assumed=assumed,
    )
    if untraced or bare:
        alone = (replay_untraced.bare if bare else replay_untraced.untraced)(plan, stored, manifest.signature)
        say(console, alone.text)
        return CODES[alone.word]
    with LiveLine(console) as line:
        result = run(plan, observers=[line])
    said = answer(result, manifest.signature)
    render_replay(console, result, said)
    return Exit.DIVERGENCE if said.others else CODES[said.word]


def _check_reproducer(folder: Path, runs: Path | None) -> None:
    """UsageError for what is not a reproducer, with the reproducers there are."""
    if (folder / MANIFEST).exists() and (folder / EVENTS).exists():
        found = list(map(str, reproducers_in(folder)))
        has = "its reproducers:  " + "  ".join(found) if found else "nothing in it failed, so it has no reproducers"
        raise UsageError(
            f"{folder} is a run folder, not a reproducer; {has}\n  judge a run again:  eaglecheck recheck {folder}"
        )
    if not folder.exists():
        raise UsageError(f"there is no folder {folder}: looked for a reproducer\n  {newest_reproducers(runs)}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a reproducer folder\n  {newest_reproducers(runs)}")
    if not (folder / MANIFEST).exists():
        raise UsageError(f"{folder} is not a reproducer folder: it has no {MANIFEST}\n  {newest_reproducers(runs)}")


def newest_reproducers(runs: Path | None) -> str:
    """The newest reproducers there are."""
    root = prepare.runs_root(runs)
    runs_there = sorted((run for run in root.glob("*") if not run.is_symlink()), reverse=True)
    found = [path for run in runs_there for path in reproducers_in(run)]
    if not found:
        return f"there are no reproducers in {root}: no run there failed"
    return f"reproducers there, newest first: {', '.join(map(str, found[:3]))}"
