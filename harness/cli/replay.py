"""`eaglecheck replay`: run one stored scenario again on a live engine, and say whether its failure is still there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.cli import prepare
from harness.cli.outcome import Exit, UsageError, guarded
from harness.progress import RunResult
from harness.runner import Plan, run
from harness.store import MANIFEST, read_specimen
from harness.types import Outcome
from reports.terminal import LiveLine, render_findings, render_verdict


@guarded
def command(
    specimen: Annotated[Path, typer.Argument(help="A specimen folder, as printed by a failing run.")],
    engine: Annotated[str | None, typer.Option(help="Replay on this release instead of the specimen's own.")] = None,
    runs: Annotated[Path | None, typer.Option(help="Where run folders go. Default: $EAGLECHECK_RUNS, else ./runs.")] = None,
) -> Exit:
    """Say FAILED (the same failure again, exit 1), FIXED (gone, exit 0) or ERROR (cannot say, exit 3)."""
    console = Console()
    if not (specimen / MANIFEST).is_file():
        raise UsageError(
            f"{specimen} is not a specimen folder: it has no {MANIFEST}\n"
            "  specimens lie in <run folder>/specimens; judge a run again with:  eaglecheck recheck RUN"
        )
    manifest, stored = read_specimen(specimen)
    version = engine or manifest.release
    env = prepare.engine_environment(version, lambda text: console.print(text, highlight=False, markup=False))
    revert = manifest.header.get("revert") if engine is None else None
    plan = Plan(
        env=env,
        scenarios=(stored.scenario,),
        pairs=prepare.checkpoint_pairs([stored.scenario], target=None, draft=None),
        root=prepare.runs_root(runs),
        device=prepare.check_device(manifest.device),
        revert=revert,
        argv=tuple(sys.argv),
    )
    with LiveLine(console) as line:
        result = run(plan, observers=[line])
    render_findings(console, result.results)
    render_verdict(console, result)
    return _say(console, result, manifest.signature)


def _say(console: Console, result: RunResult, signature: str) -> Exit:
    found = {finding.signature for finding in result.results[0].findings}
    if signature in found:
        console.print(f"FAILED: {signature} is still there on SGLang {result.engine}", style="bold red", soft_wrap=True)
        return Exit.DIVERGENCE
    if result.verdict.outcome is Outcome.UNKNOWN:
        console.print(f"ERROR: cannot say whether {signature} is still there", style="bold yellow", soft_wrap=True)
        return Exit.UNKNOWN
    if result.verdict.outcome is Outcome.FAIL:
        console.print(f"FIXED: {signature} is gone, but other divergences are there (see above)", soft_wrap=True)
        return Exit.DIVERGENCE
    console.print(f"FIXED: {signature} is gone on SGLang {result.engine}", style="bold green", soft_wrap=True)
    return Exit.PASS
