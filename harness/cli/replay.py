"""`eaglecheck replay`: run one stored scenario again on a live engine, and say whether its failure is still there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.archive.store import EVENTS, MANIFEST, read_specimen, started_with
from harness.cli import options, prepare, replay_unwatched
from harness.cli.outcome import Exit, guarded
from harness.contract.usage import UsageError
from harness.driving.runner import run
from reports.prose import say
from reports.replay import answer, render_replay
from reports.terminal import LiveLine

CODES = {"FAILED": Exit.DIVERGENCE, "FIXED": Exit.PASS, "ERROR": Exit.UNKNOWN}


@guarded
def command(
    specimen: Annotated[Path, typer.Argument(help="A specimen folder, as printed by a failing run.")],
    engine: Annotated[
        str | None, typer.Option(help="Replay on this release, as published, instead of the specimen's own.")
    ] = None,
    untraced: Annotated[
        bool, typer.Option("--untraced", help="Without our probe: only crashes, hangs and texts can be seen.")
    ] = False,
    bare: Annotated[
        bool, typer.Option("--bare", help="SGLang alone, with none of our code in its processes; needs a GPU.")
    ] = False,
    gpu_share: options.GpuShare = None,
    runs: options.Runs = None,
) -> Exit:
    """Say FAILED (the same failure again, exit 1), FIXED (gone, exit 0) or ERROR (cannot say, exit 3)."""
    console = Console()
    if untraced and bare:
        raise UsageError("--untraced and --bare are two ways of looking\n  name one of them")
    if (specimen / MANIFEST).exists() and (specimen / EVENTS).exists():
        found = sorted(str(path.parent) for path in specimen.glob(f"specimens/*/{MANIFEST}"))
        has = "its specimens:  " + "  ".join(found) if found else "nothing in it failed, so it has no specimens"
        raise UsageError(
            f"{specimen} is a run folder, not a specimen; {has}\n"
            f"  judge a run again with:  eaglecheck recheck {specimen}"
        )
    if specimen.exists() and not specimen.is_dir():
        raise UsageError(f"{specimen} is a file, no folder: looked for a specimen\n  {_specimens(runs)}")
    if not specimen.exists():
        raise UsageError(f"there is no folder {specimen}: looked for a specimen\n  {_specimens(runs)}")
    if not (specimen / MANIFEST).exists():
        raise UsageError(
            f"{specimen} is not a specimen folder: it has no {MANIFEST}\n"
            "  specimens lie in <run folder>/specimens; judge a run again with:  eaglecheck recheck RUN"
        )
    manifest, stored = read_specimen(specimen)
    pair = manifest.header.get("pair")
    target, draft = map(Path, pair) if pair else (None, None)
    assumed, attention = started_with(manifest, stored)
    plan = prepare.make_plan(
        [stored.scenario],
        say=lambda text: say(console, text),
        engine=engine or manifest.release,
        device=manifest.device,
        revert=manifest.header.get("revert") if engine is None else None,
        target=target,
        draft=draft,
        gpu_share=gpu_share,
        runs=runs,
        cpu_attention=attention,
        assumed=assumed,
    )
    if untraced or bare:
        alone = (replay_unwatched.bare if bare else replay_unwatched.untraced)(plan, stored, manifest.signature)
        say(console, alone.text)
        return CODES[alone.word]
    with LiveLine(console) as line:
        result = run(plan, observers=[line])
    said = answer(result, manifest.signature)
    render_replay(console, result, said)
    return Exit.DIVERGENCE if said.others else CODES[said.word]


def _specimens(runs: Path | None) -> str:
    """The newest specimens there are."""
    root = prepare.runs_root(runs)
    found = sorted((path.parent for path in root.glob(f"*/specimens/*/{MANIFEST}")), reverse=True)
    found = [path for path in found if not path.parents[1].is_symlink()]
    if not found:
        return f"there are no specimens in {root}: no run there has failed"
    return f"specimens that are there, newest first: {', '.join(map(str, found[:3]))}"
