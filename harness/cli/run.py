"""`eaglecheck run`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cases import catalogue
from harness.cli import options, prepare
from harness.cli.documents import check_target, run_document, write_json
from harness.cli.engine_options import engine_options
from harness.cli.interrupted import kept
from harness.cli.outcome import BY_OUTCOME, Exit, guarded
from harness.driving.adapt import NOTHING, Wanted
from harness.driving.runner import Interrupted, run
from harness.engines import component
from reports.prose import say
from reports.terminal import LiveLine, render_run


@guarded
@engine_options
def command(
    engine: options.Release = None,
    device: options.Device = "cpu",
    scenario: Annotated[
        list[str] | None, typer.Option(help="Only this scenario or corpus case; may be repeated.")
    ] = None,
    family: options.Family = None,
    assume: options.Assume = None,
    scenario_file: Annotated[
        list[Path] | None, typer.Option(help="A scenario in a JSON file; may be repeated.")
    ] = None,
    revert: Annotated[int | None, typer.Option(help="Revert this pull request, by SGLang's own switch.")] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    cpu_attention: Annotated[
        str, typer.Option(help="CPU attention: 'torch' (our stand-in) or 'interpreted' (SGLang's kernels, slower).")
    ] = "torch",
    gpu_share: options.GpuShare = None,
    wanted: Wanted = NOTHING,
    runs: options.Runs = None,
    json: options.Json = None,
) -> Exit:
    """Drive SGLang through scenarios, compare every draft chain with the reference, print a verdict."""
    console = Console(stderr=json == "-")
    check_target(json, inputs=scenario_file or ())
    chosen = prepare.choose_scenarios(scenario or [], scenario_file or [], family)
    for text in _left_out(scenario or [], assume or []):
        say(console, text)
    plan = prepare.make_plan(
        chosen,
        say=lambda text: say(console, text),
        engine=engine,
        device=device,
        revert=revert,
        target=target,
        draft=draft,
        cpu_attention=cpu_attention,
        gpu_share=gpu_share,
        wanted=wanted,
        runs=runs,
        assumed=assume or (),
    )
    with kept(json, _by_now), LiveLine(console) as line:
        result = run(plan, observers=[line])
    render_run(console, result, notes=component.notes(result.header))
    write_json(run_document(result) | component.document(result.header), json)
    return BY_OUTCOME[result.verdict.outcome]


def _by_now(stop: KeyboardInterrupt) -> dict[str, Any]:
    assert isinstance(stop, Interrupted), "the run ends with nothing else"
    return run_document(stop.result)


def _left_out(names: list[str], assumed: list[str]) -> list[str]:
    """One line for each corpus case whose release window holds only with something taken for granted that is not."""
    found = []
    for name in names:
        missing = sorted({*catalogue.load(name).assumes} - {*assumed}) if name in catalogue.names() else []
        if missing:
            options = " ".join(f"--assume {one}" for one in missing)
            found.append(f"the release window of {name} holds with  {options}")
    return found
