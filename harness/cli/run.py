"""`eaglecheck run`: the main job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.cli import prepare
from harness.cli.outcome import BY_OUTCOME, Exit, guarded
from harness.documents import run_document, write_json
from harness.runner import Plan, run
from reports.terminal import LiveLine, render_run


@guarded
def command(
    engine: Annotated[
        str | None, typer.Option(help="SGLang release, for example 0.5.13. Default: the one installed here, else the newest.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device to run the engine on.")] = "cpu",
    scenario: Annotated[list[str] | None, typer.Option(help="Only this scenario or corpus case; may be repeated.")] = None,
    scenario_file: Annotated[list[Path] | None, typer.Option(help="A scenario in a JSON file; may be repeated.")] = None,
    revert: Annotated[int | None, typer.Option(help="Put this pull request's fix back out, by SGLang's own switch.")] = None,
    target: Annotated[Path | None, typer.Option(help="Target checkpoint folder instead of the tiny one.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft checkpoint folder that goes with --target.")] = None,
    cpu_attention: Annotated[
        str, typer.Option(help="CPU attention: 'torch' (our stand-in) or 'interpreted' (SGLang's kernels, slower).")
    ] = "torch",
    runs: Annotated[Path | None, typer.Option(help="Where run folders go. Default: $EAGLECHECK_RUNS, else ./runs.")] = None,
    json: Annotated[str | None, typer.Option(help="Write the result as JSON to this file, '-' for standard output.")] = None,
) -> Exit:
    """Drive SGLang through scenarios, compare every draft chain with the reference, print a verdict."""
    console = Console(stderr=json == "-")
    prepare.check_device(device)
    prepare.check_attention(cpu_attention)
    scenarios = prepare.choose_scenarios(scenario or [], scenario_file or [])
    env = prepare.engine_environment(engine, lambda text: console.print(text, highlight=False, markup=False))
    prepare.check_revert(revert, env.version)
    pairs = prepare.checkpoint_pairs(scenarios, target=target, draft=draft)
    if target is not None:
        prepare.load_pair_now(pairs)
    plan = Plan(
        env=env,
        scenarios=tuple(scenarios),
        pairs=pairs,
        root=prepare.runs_root(runs),
        device=device,
        revert=revert,
        cpu_attention="interpreted" if cpu_attention == "interpreted" else "torch",
        argv=tuple(sys.argv),
    )
    with LiveLine(console) as line:
        result = run(plan, observers=[line])
    render_run(console, result)
    if json is not None:
        write_json(run_document(result), json)
    return BY_OUTCOME[result.verdict.outcome]
