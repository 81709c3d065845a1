"""`eaglecheck run`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cases import catalogue
from harness.cli import options, prepare
from harness.cli.documents import interrupted_run, run_document
from harness.cli.outcome import BY_OUTCOME, Exit, guarded, kept
from harness.cli.programs import choose_scenarios, of_prompts
from harness.contract.known_issues import assumable
from harness.contract.outputs import check_target, write_json
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError
from harness.contract.words import counted
from harness.driving.adapt import NOTHING, Wanted
from harness.driving.own_pair import own_pair
from harness.driving.runner import in_boot_order, run
from harness.engines import component
from harness.engines.launch import CpuAttention
from reports.live import LiveLine
from reports.prose import say
from reports.terminal import render_run


@guarded
@options.takes_settings()
def command(
    engine: options.Release = None,
    device: options.Device = "cpu",
    scenario: Annotated[
        list[str] | None, typer.Option(help="Run only this scenario or corpus case; may be repeated.")
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
        CpuAttention, typer.Option(help="CPU attention: our replacement in torch, or SGLang's kernels, slower.")
    ] = "torch",
    reference: options.Reference = "auto",
    reference_device: options.ReferenceDevice = "auto",
    gpu_share: options.GpuShare = None,
    boots_ahead: options.BootsAhead = None,
    spawn: options.Spawn = False,
    wanted: Wanted = NOTHING,
    prompts: options.Prompts = None,
    arrivals: Annotated[
        float | None, typer.Option(help="Of --prompts: requests that arrive a scheduler step, on average. Default: 1.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of --prompts: tokens each request asks for. Default: 64.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of --prompts: decides when each request arrives. Default: 0.")
    ] = None,
    runs: options.Runs = None,
    json: options.Json = None,
) -> Exit:
    """Drive SGLang through scenarios and judge every draft chain.

    Compares what the engine fed, proposed, accepted and stored with an independent reference. Exits 0 if all of it
    agrees, 1 if something diverges, 3 if a scenario could not be judged.
    """
    console = Console(stderr=json == "-")
    check_target(json, inputs=scenario_file or (), beside=prepare.runs_root(runs))
    own = own_pair(target, draft)
    of_prompts_alone = {"--arrivals": arrivals, "--max-new-tokens": max_new_tokens, "--seed": seed}
    if prompts is None and (given := [name for name, value in of_prompts_alone.items() if value is not None]):
        raise UsageError(f"{given[0]} belongs to --prompts\n  name the file:  --prompts FILE, or leave {given[0]} out")
    notes: list[str] = []
    if prompts is None:
        chosen = choose_scenarios(scenario or [], scenario_file or [], family, own)
    elif scenario or scenario_file or family:
        raise UsageError("--prompts makes the scenario itself\n  leave --scenario, --scenario-file and --family out")
    else:
        rate = 1.0 if arrivals is None else arrivals
        chosen = [of_prompts(prompts, own, wanted, rate=rate, new_tokens=max_new_tokens or 64, seed=seed or 0)]
        lengths = sorted(len(request.input_ids) for request in chosen[0].requests)
        context = chosen[0].engine.context_length
        notes = [
            f"{counted(len(lengths), 'prompt')} of {lengths[0]} to {lengths[-1]} tokens, in a context of {context}"
        ]
    known = _known_failures(chosen, device, assume or []) if family else []
    notes += [*_left_out(scenario or [], assume or []), *known]
    plan = prepare.make_plan(
        chosen,
        say=lambda text: say(console, text),
        engine=engine,
        device=device,
        revert=revert,
        own=own,
        cpu_attention=cpu_attention,
        reference=reference,
        reference_device=reference_device,
        gpu_share=gpu_share,
        boots_ahead=boots_ahead,
        spawn=spawn,
        wanted=wanted,
        runs=runs,
        assumed=assume or (),
        files=[None] * (len(chosen) - len(scenario_file or [])) + [*(scenario_file or [])],
        notes=notes,
    )
    order = [one.name for one in in_boot_order(plan.scenarios)]
    if order != [one.name for one in plan.scenarios] and (scenario or scenario_file):
        say(console, f"scenarios that share an engine run behind each other, so in this order: {', '.join(order)}")
    with kept(json, interrupted_run), LiveLine(console) as line:
        result = run(plan, observers=[line])
    render_run(console, result, notes=component.notes(result.header))
    write_json(run_document(result) | component.document(result.header), json)
    return BY_OUTCOME[result.verdict.outcome]


def _known_failures(chosen: list[Scenario], device: str, assumed: list[str]) -> list[str]:
    """A line of the known findings that fail scenarios of a family's set wherever they are and are not assumed."""
    keys = [(scenario, {key for request in scenario.requests for key in request.asked}) for scenario in chosen]
    met = {
        name: sum(one.shows_in(each.spec, each.engine, device=device, asked=asked) for each, asked in keys)
        for name, one in assumable().items()
        if name not in assumed
    }
    fails = {name: number for name, number in met.items() if number}
    if not fails:
        return []
    ids = dict.fromkeys(each for name in fails for each in (name, *assumable()[name].behind))
    said = ", ".join(f"{name} fails {number}" for name, number in fails.items())
    options = " ".join(f"--assume {each}" for each in ids)
    return [f"{said} of {counted(len(chosen), 'scenario')} here; to have the rest of them judged, add  {options}"]


def _left_out(names: list[str], assumed: list[str]) -> list[str]:
    """One line for each corpus case whose release window holds only with something taken for granted that is not."""
    found = []
    for name in names:
        missing = sorted({*catalogue.load(name).assumes} - {*assumed}) if name in catalogue.names() else []
        if missing:
            options = " ".join(f"--assume {one}" for one in missing)
            found.append(f"the release window of {name} holds with  {options}")
    return found
