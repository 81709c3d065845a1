"""`eaglecheck mutants`: puts mutants into an engine and shows which checks notice."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import chain
from typing import Annotated

import typer
from rich.console import Console

from cases.programs import EXERCISES
from harness.both_sides.mutants import MUTANTS, Mutant
from harness.cli import judges, options, prepare
from harness.cli.outcome import BY_OUTCOME, Exit, guarded, kept, typed_again
from harness.cli.scenario_checks import check_scenarios
from harness.contract.outputs import check_target, writable, write_json
from harness.contract.providers import AUTO
from harness.contract.usage import UsageError
from harness.driving.adapt import NOTHING, Wanted, adapted
from harness.driving.refusals import untaken
from harness.engines import envs
from harness.search.mutants_report import document, undrivable
from harness.search.text import MutantLine, render_mutants_report
from reports.prose import say


@guarded
@options.takes_settings(("cuda_graph", "prefill_cuda_graph", "server_args"))
def command(
    engine: options.Release = None,
    device: options.Device = "cpu",
    only: Annotated[str | None, typer.Option(help="Only these mutants, comma-separated.")] = None,
    wanted: Wanted = NOTHING,
    gpu_share: options.GpuShare = None,
    runs: options.Runs = None,
    json: options.Json = None,
) -> Exit:
    """Put mutants into the running engine and show which checks notice.

    Exits 0 if every mutant that can run here is killed and every check kills at least one, 1 if not, and 3 if the
    engine does not pass without a mutant. With --only checks may be idle, but each mutant named must run, or it is 3.
    """
    from harness.driving.live import LiveEngines
    from harness.search.mutants import Campaign

    console = Console(stderr=json == "-")
    check_target(json)
    prepare.check_device(device)
    mutants = _chosen(only)
    needs = {mutant.needs for mutant in mutants}
    exercises = {need: adapted(made, wanted, device=device) for need, made in EXERCISES.items() if need in needs}
    asked = list(chain.from_iterable(exercises.values()))
    check_scenarios(asked, device=device)
    version = envs.resolve(engine)
    for mutant in mutants if only is not None else ():
        if why := undrivable(mutant.needs, exercises[mutant.needs], release=version, device=device):
            raise UsageError(f"--only {mutant.id}: {why}")
    reference = judges.provider(AUTO, None, asked, say=lambda text: say(console, text))
    lease = prepare.gpu_lease(device, gpu_share)
    root = writable(prepare.runs_root(runs))
    env = prepare.engine_environment(version, lambda text: say(console, text))
    if why := next(filter(None, (untaken(one, env) for one in asked)), ""):
        raise UsageError(why)
    logs = root / f"mutants-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    engines = LiveEngines(
        environment=lambda _version: env,
        default=env.version,
        device=device,
        logs=logs,
        lease=lease,
        reference=reference,
        copies=True,
        mutants_in_graphs=bool(wanted.cuda_graph),
        assumed=("F-007",),  # an engine that dies of its own idle rank shows no mutant of one
    )
    try:
        with MutantLine(console) as line:
            campaign = Campaign(engines, env.version, mutants, line, exercises, device)
            with kept(json, lambda stop: document(campaign.cut_off(str(stop) or "interrupted")), left=_left):
                report = campaign.run()
    finally:
        engines.close()
    render_mutants_report(console, report, again=lambda ids: typed_again(more=("--only", ids)))
    if logs.is_dir():
        say(console, f"engine logs: {logs}")
    write_json(document(report), json)
    return BY_OUTCOME[report.outcome]


def _left() -> str:
    return f"nothing else of it is kept\n  run it again, or fewer mutants with --only:  {typed_again()}"


def _chosen(only: str | None) -> list[Mutant]:
    if only is None:
        return list(MUTANTS.values())
    names = prepare.split_list(only, option="only")
    prepare.check_names(names, MUTANTS, option="only", what="mutant")
    return [MUTANTS[name] for name in names]
