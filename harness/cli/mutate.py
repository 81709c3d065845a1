"""`eaglecheck mutate`: faults of one line in SGLang's own source, made by machine, and which checks notice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cases.families import FAMILIES
from harness.cli import options, prepare
from harness.cli.outcome import BY_OUTCOME, Exit, guarded, kept, typed_again
from harness.cli.scenario_checks import check_scenarios
from harness.contract import plain_files
from harness.contract.outputs import check_target, writable, write_json
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError
from harness.contract.words import counted
from harness.driving.adapt import NOTHING, Wanted
from harness.engines import envs
from harness.search import mutant_results
from harness.search.executed import Followed, One
from harness.search.faults import draw
from harness.search.mutant_results import Asked, Campaign
from harness.search.mutate_report import Report, document
from harness.search.tasks import Place
from harness.search.text import line_of, render_mutate_report
from harness.search.workers import Boot, Setup, ask_all, follow_all
from reports.prose import say

#: Drawn unless somebody says otherwise; families they are drawn over.
COUNT, USUAL = 300, "eagle,eagle3,tree,paged,mtp"
#: What `faults.asked` calls a mutant: file, line, and a digest of the change.
NAME = re.compile(r"\w+-\d+-[0-9a-f]{6}")


@guarded
@options.takes_settings(options.OF_KERNELS)
def command(
    engine: options.Release = None,
    device: options.Device = "cpu",
    family: Annotated[
        str, typer.Option(help="Families, comma-separated, whose fixed scenarios run the lines.")
    ] = USUAL,
    count: Annotated[int, typer.Option(min=1, help="Mutants to draw.")] = COUNT,
    seed: Annotated[int, typer.Option(help="The same seed draws the same mutants of the same lines.")] = 1,
    examples: Annotated[int, typer.Option(min=0, help="Generated scenarios for what survives the families.")] = 8,
    a_boot: Annotated[
        int, typer.Option("--a-boot", min=1, help="Scenarios of a boot configuration whose lines are drawn from.")
    ] = 3,
    inside_graphs: Annotated[
        bool, typer.Option("--inside-graphs", help="Lines that run while CUDA graphs are captured, instead of others.")
    ] = False,
    follow_only: Annotated[
        bool, typer.Option("--follow-only", help="Only look which lines run, and keep that.")
    ] = False,
    wanted: Wanted = NOTHING,
    gpu_share: options.GpuShare = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that ask, each with an engine.")] = 2,
    shard: Annotated[str | None, typer.Option(metavar="N/M", help="Ask only the n-th of m parts.")] = None,
    only: Annotated[str | None, typer.Option(help="Ask only these mutants, again, comma-separated.")] = None,
    survivors_of: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Ask what survived there, in these families' scenarios, instead of drawing."),
    ] = None,
    merge: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Count what another shard kept too; may be repeated.")
    ] = None,
    runs: options.Runs = None,
    json: options.Json = None,
) -> Exit:
    """Write one line of SGLang's source wrong, many times over, and show which checks notice.

    What was asked is kept, and is not asked again unless something of ours failed. Exits 0 if every mutant is killed
    or explained, 1 if one survives, 3 if not all were asked.
    """
    console = Console(stderr=json == "-")
    check_target(json)
    version = envs.resolve(engine)
    names = prepare.split_list(family, option="family")
    prepare.check_names(names, FAMILIES, option="family", what="family")
    _exclude(
        "--follow-only",
        follow_only,
        {"--only": only, "--survivors-of": survivors_of, "--merge": merge, "--shard": shard},
    )
    _exclude("--only", only, {"--shard": shard})
    asked_only = None if only is None else _names(only)
    prepare.check_device(device)
    if inside_graphs and not wanted.cuda_graph:
        raise UsageError("--inside-graphs: no engine captures CUDA graphs\n  add  --device cuda --cuda-graph")
    before = [] if survivors_of is None else [survivors_of]
    for option, kept_there in [("--survivors-of", one) for one in before] + [("--merge", one) for one in merge or ()]:
        _check_kept(option, kept_there, version=version, seed=seed)
    place = Place(release=version, device=device, wanted=wanted)
    for name in names:
        each = place.each(FAMILIES[name].scenarios)
        check_scenarios([one for one, _ in each], device=device)
        if all(why for _, why in each):
            raise UsageError(f"--family {name}: {each[0][1]}")
    lease = prepare.gpu_lease(device, gpu_share)
    part = prepare.shard_of(shard)
    runs_root = writable(prepare.runs_root(runs))
    env = prepare.engine_environment(version, lambda text: say(console, text))
    if (package := env.package) is None:
        raise UsageError(f"the source of SGLang {version} is not on this disk: there is nothing to mutate")
    settings = [f"{name}={value}" for name, value in wanted.changes().items()]
    root = runs_root / "-".join(["mutate", version, *([] if device == "cpu" else [device]), *names, *settings])
    folder = root / (f"seed-{seed}-inside-graphs" if inside_graphs else f"seed-{seed}")
    if survivors_of is not None:
        folder = root / f"survivors-of-{survivors_of.resolve().parent.name}-{survivors_of.resolve().name}"
    folder.mkdir(parents=True, exist_ok=True)
    setup = Setup(env=env, package=package, place=place, folder=folder, seed=seed, examples=examples, lease=lease)
    followed = _followed(root, setup, names, a_boot=a_boot, workers=workers, console=console)
    if follow_only:
        return Exit.PASS if all(not one.why for one in followed.sounds) else Exit.UNKNOWN
    plan = _plan(setup, followed, names, count=count, captured=inside_graphs, survivors_of=survivors_of)
    plain_files.replace(folder / mutant_results.PLAN, plan.model_dump_json(indent=1).encode(), sync=True)
    explained = mutant_results.explanations()
    part_of = mutant_results.shares(plan.mutants, part)
    if asked_only is not None:
        part_of = _named(plan, asked_only)
    kept_before = mutant_results.read_results(before if only is not None else [*before, folder])
    known = {name: result for name, result in kept_before.items() if result.end is not mutant_results.Status.ERROR}
    say(console, f"{counted(len(part_of), 'mutant')} of SGLang {version}; kept in {folder}")

    def report() -> Report:
        return Report.of(plan, mutant_results.read_results([*before, folder, *(merge or ())]), explained)

    with kept(json, lambda _stop: document(report()), left=lambda: f"go on:  {typed_again()}"):
        asked = {one.id: one for one in part_of}
        setup = replace(setup, sounds=followed.sounds)
        holding = {name for name, one in explained.items() if one.holds_in(plan)}
        for result in ask_all(setup, part_of, known, explained=holding, workers=workers):
            mutant_results.append(folder, result)
            say(console, f"{len(known)} of {len(part_of)}  {line_of(asked[result.id], result)}")
    render_mutate_report(console, report())
    write_json(document(report()), json)
    return BY_OUTCOME[report().outcome]


def _exclude(option: str, given: object, others: dict[str, object]) -> None:
    """UsageError for options of which one would have no effect beside the other."""
    for name, value in others.items():
        if given and value:
            raise UsageError(f"{option} and {name} exclude each other\n  leave one of them out")


def _check_kept(option: str, folder: Path, *, version: str, seed: int) -> None:
    """UsageError, before anything is followed, for a folder that holds no mutants of this release."""
    name_one = f"name what another shard kept:  {option} RUNS/mutate-{version}-FAMILIES/seed-{seed}"
    if not folder.is_dir():
        raise UsageError(f"{option} {folder}: there is no such folder\n  {name_one}")
    try:
        drawn = mutant_results.read_plan(folder)
    except mutant_results.NoCampaign as error:
        raise UsageError(f"{option} {folder}: {error}\n  {name_one}") from error
    if drawn.engine != version:
        raise UsageError(f"{option} {folder}: drawn for SGLang {drawn.engine}\n  add  --engine {drawn.engine}")


def _followed(root: Path, setup: Setup, names: list[str], *, a_boot: int, workers: int, console: Console) -> Followed:
    """What the families' fixed scenarios show without a mutant: driven once for a release, whatever the seed."""
    scenarios = _smallest(names, setup, a_boot=a_boot)
    known = {one.sound.scenario.id: one for one in mutant_results.read_lines(root / mutant_results.SOUND, One)}
    boots = _boots(scenarios, known, canary=(setup.package / "srt" / "kv_canary").is_dir())
    if todo := [one for one in boots if one.unknown or one.unwatched() is not None]:
        say(console, f"following {counted(len(todo), 'boot configuration')} without a mutant, once")
        for number, new in enumerate(follow_all(replace(setup, folder=root), todo, workers=workers), 1):
            for one in new:
                known[one.sound.scenario.id] = one
                if one.sound.rows:
                    mutant_results.add_line(root / mutant_results.SOUND, one)
                why = f": {one.sound.why}" if one.sound.why else ""
                say(console, f"{number} of {len(todo)}  {one.sound.scenario.name} {one.sound.seconds:.1f} s{why}")
    return Followed.of([known[one.id] for _, one in scenarios])


def _boots(scenarios: Sequence[tuple[str, Scenario]], known: Mapping[str, One], *, canary: bool) -> list[Boot]:
    """What is followed, and what is to be, boot configuration by boot configuration."""
    boots: dict[str, list[tuple[str, Scenario]]] = {}
    for one in scenarios:
        boots.setdefault(one[1].boot_key(), []).append(one)
    return [
        Boot(
            known=tuple(known[one.id] for _, one in each if one.id in known),
            unknown=tuple(one for one in each if one[1].id not in known),
            canary=canary,
        )
        for each in boots.values()
    ]


def _smallest(names: list[str], setup: Setup, *, a_boot: int) -> list[tuple[str, Scenario]]:
    """(family, scenario): of each boot configuration those that read and generate fewest tokens."""
    chosen, boots = [], Counter[str]()
    for name in names:
        for one in sorted(setup.place.made(FAMILIES[name].scenarios), key=_tokens):
            if boots[one.boot_key()] < a_boot:
                boots[one.boot_key()] += 1
                chosen.append((name, one))
    return sorted(chosen, key=lambda one: (names.index(one[0]), one[1].boot_key()))


def _tokens(scenario: Scenario) -> int:
    return sum(len(request.input_ids) + 4 * request.max_new_tokens for request in scenario.requests)


def _plan(
    setup: Setup, followed: Followed, names: list[str], *, count: int, captured: bool, survivors_of: Path | None
) -> Campaign:
    """Drawn from what was followed, or the mutants of another campaign of the same release."""
    if survivors_of is None:
        mutants = _drawn(setup, followed, count=count, captured=captured)
    else:
        mutants = mutant_results.read_plan(survivors_of).mutants
    return Campaign(
        engine=setup.env.version,
        device=setup.place.device,
        families=tuple(names),
        seed=setup.seed,
        examples=setup.examples,
        left_out=tuple(f"{one.scenario.name}: {one.why}" for one in followed.sounds if one.why),
        mutants=mutants,
    )


def _drawn(setup: Setup, followed: Followed, *, count: int, captured: bool) -> tuple[Asked, ...]:
    """A campaign that goes on keeps its mutants, though families have other scenarios by now, which run other lines."""
    kept_here = setup.folder / mutant_results.PLAN
    try:
        mutants = mutant_results.read_plan(setup.folder).mutants[:count] if kept_here.exists() else ()
    except mutant_results.NoCampaign as error:
        raise UsageError(f"{setup.folder}: {error}\n  draw anew:  rm {kept_here}") from error
    if len(mutants) == count:
        return mutants
    ran = followed.captured if captured else followed.ran
    return tuple(draw(setup.package, ran, count=count, seed=setup.seed, captured=captured))


def _names(only: str) -> list[str]:
    """Mutants by name; UsageError, before anything is followed, for what cannot be one."""
    names = prepare.split_list(only, option="only")
    for name in names:
        if NAME.fullmatch(name) is None:
            raise UsageError(
                f"--only {name}: no mutant is called so\n  as they are listed:  --only eagle_worker_v2-96-0fca21"
            )
    return names


def _named(plan: Campaign, names: list[str]) -> list[Asked]:
    known = {one.id: one for one in plan.mutants}
    prepare.check_names(names, known, option="only", what="mutant")
    return [known[name] for name in names]
