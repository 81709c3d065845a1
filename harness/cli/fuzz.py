"""`eaglecheck fuzz`: generated scenarios, for so many or for so long."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Annotated

import typer
from rich.console import Console

from cases.boots import Boot
from cases.families import FAMILIES
from cases.prompts import with_prompts
from harness.cli import options, prepare
from harness.cli.documents import interrupted_run, run_document
from harness.cli.outcome import BY_OUTCOME, Exit, guarded, kept
from harness.cli.programs import check_family, of_pair, past_eos, tokens_of, usual_family
from harness.contract.outputs import check_target, write_json
from harness.contract.providers import WITNESS
from harness.contract.usage import UsageError, unknown
from harness.contract.words import counted
from harness.driving.adapt import NOTHING, Wanted
from harness.driving.own_pair import OwnPair, own_pair
from harness.driving.plan import Plan
from harness.driving.refusals import undrawn
from harness.driving.results import RunResult
from harness.driving.runner import run
from harness.engines import envs
from reports.live import LiveLine
from reports.prose import say
from reports.terminal import render_run

#: Without --examples and --seconds; how many an engine gets through in a second at most; and seconds of a day.
EXAMPLES, A_SECOND, LONGEST = 100, 4, 86400
#: Seconds of scenarios that are worth a boot, which takes as long; and scenarios that take some seconds to draw.
WORTH_A_BOOT, WORTH_SAYING = 30, 2000


@guarded
@options.takes_settings()
def command(
    engine: options.Release = None,
    device: options.Device = "cpu",
    family: Annotated[
        str | None,
        typer.Option(help="The draft family to generate for, for example tree. Default: eagle, or that of --draft."),
    ] = None,
    boot: Annotated[
        list[str] | None, typer.Option(help="Only this boot configuration of the family; may be repeated.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Scenarios in all, the boot configurations taking turns. Default: 100.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=LONGEST, help="Stop after so long, the engines' boots apart.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same scenarios. Default: random.")] = None,
    shrink: Annotated[
        float, typer.Option(min=0, help="Seconds for making each failure small; 0 leaves them as they are.")
    ] = 60.0,
    assume: options.Assume = None,
    revert: Annotated[int | None, typer.Option(help="Revert this pull request, by SGLang's own switch.")] = None,
    reference: options.Reference = "auto",
    reference_device: options.ReferenceDevice = "auto",
    target: options.Target = None,
    draft: options.Draft = None,
    gpu_share: options.GpuShare = None,
    boots_ahead: options.BootsAhead = None,
    spawn: options.Spawn = False,
    wanted: Wanted = NOTHING,
    prompts: options.Prompts = None,
    runs: options.Runs = None,
    json: options.Json = None,
) -> Exit:
    """Drive SGLang through generated scenarios and shrink what fails.

    Judges as `run` does, with the same exit codes.
    """
    from cases.generation import generate, greedy  # Hypothesis

    console = Console(stderr=json == "-")
    check_target(json, beside=prepare.runs_root(runs))
    prepare.check_device(device)
    version = envs.resolve(engine)
    own = own_pair(target, draft)
    tokens = None if prompts is None else tokens_of(prompts, own, wanted)
    boots = _boots(family or usual_family(own), boot or [], release=version, own=own)
    chosen = secrets.randbelow(10**6) if seed is None else seed
    notes = [f"seed {chosen}: the same scenarios again with  --seed {chosen}"]
    if seconds and not (boot or examples):
        boots, left_out = _in_time(boots, seconds, seed=chosen)
        if left_out:
            notes.append(_too_short(seconds, left_out, of=len(boots) + len(left_out)))
    count = examples or (EXAMPLES if seconds is None else int(seconds * A_SECOND))
    shares = _shares(boots, count)
    boots, left_out = [one for one, _ in shares], boots[len(shares) :]
    if left_out:
        notes.append(_too_few(count, left_out))
    if count > WORTH_SAYING:
        say(console, f"drawing {count} scenarios first")
    scenarios = [one for each, share in shares for one in generate(each, count=share, seed=chosen)]
    env = prepare.engine_environment(version, lambda text: say(console, text)) if device == "cuda" else None
    if env and (kept_out := [one for one in scenarios if undrawn(one, env, device=device)]):
        why = undrawn(kept_out[0], env, device=device).partition("\n")[0]
        notes.append(f"{len(kept_out)} of {counted(len(scenarios), 'scenario')} left out; of the first: {why}")
        scenarios = [one for one in scenarios if one not in kept_out]
    notes.append(prepare.ahead(len(boots), seconds))
    if own is not None:
        scenarios = list(map(past_eos, scenarios))
    if tokens is not None:
        scenarios = [with_prompts(one, tokens, seed=chosen) for one in scenarios]
    plan = prepare.make_plan(
        scenarios,
        say=lambda text: say(console, text),
        engine=version,
        device=device,
        revert=revert,
        reference=reference,
        reference_device=reference_device,
        own=own,
        gpu_share=gpu_share,
        boots_ahead=boots_ahead,
        spawn=spawn,
        wanted=wanted,
        runs=runs,
        assumed=assume or (),
        usual=[one for each in boots for one in each.assumes],
        notes=notes,
    )
    if plan.setup.reference == WITNESS:
        plan = replace(plan, scenarios=tuple(greedy(plan.scenarios)))
        greedily = counted(len(plan.scenarios), "scenario")
        say(console, f"{greedily} of {len(scenarios)}, of greedy tokens alone: a witness follows nothing else")
    plan = replace(plan, time_limit=None if seconds is None else seconds / len(boots))
    with kept(json, interrupted_run), LiveLine(console) as line:
        result = run(plan, observers=[line])
    left = len(plan.scenarios) - len(result.results)
    cut = left and seconds and examples  # without --examples more were drawn than could be driven
    over = [f"{counted(left, 'scenario')} were left out: the {seconds:g} s were over"] if cut else []
    try:
        _small(console, plan, result, seconds=shrink)
    finally:  # whoever ends it meanwhile has what was judged
        render_run(console, result, notes=over)
        write_json(run_document(result) | {"seed": chosen}, json)
    return BY_OUTCOME[result.verdict.outcome]


def _boots(family: str, names: Sequence[str], *, release: str, own: OwnPair | None) -> list[Boot]:
    """The boot configurations named, on whatever release; without names, those that work on it, once for a pair."""
    if family not in FAMILIES:
        raise UsageError(unknown("family", family, FAMILIES))
    known = {one.name: one for one in FAMILIES[family].boots}
    if own is not None:
        check_family(family, own)
        known = of_pair(known, own)
    prepare.check_names(names, known, option="boot", what="boot configuration")
    chosen = [known[name] for name in names] or [one for one in known.values() if one.planned_on(release)]
    if not chosen:
        raise UsageError(
            f"generation plans no boot configuration of family {family} on SGLang {release}\n"
            f"  choose a newer release:  --engine VERSION, or name some:  --boot NAME  ({', '.join(known)})"
        )
    return chosen


def _shares(boots: Sequence[Boot], count: int) -> list[tuple[Boot, int]]:
    """How many scenarios each gets of so many in all, taking turns; those that get none are left out."""
    each, more = divmod(count, len(boots))
    return [(one, each + (place < more)) for place, one in enumerate(boots) if each or place < more]


def _in_time(boots: Sequence[Boot], seconds: float, *, seed: int) -> tuple[list[Boot], list[Boot]]:
    """Those that a boot is worth in so many seconds, one at least, chosen by the seed; and those left out."""
    most = max(1, int(seconds // WORTH_A_BOOT))
    taken = {one.name for one in Random(seed).sample(list(boots), min(most, len(boots)))}
    return [one for one in boots if one.name in taken], [one for one in boots if one.name not in taken]


def _too_short(seconds: float, left_out: Sequence[Boot], *, of: int) -> str:
    names = ", ".join(one.name for one in left_out)
    return (
        f"{len(left_out)} of {counted(of, 'boot configuration')} left out, since {seconds:g} s are worth no more boots "
        f"(another seed takes others): {names}\n"
        f"  choose by name:  --boot {left_out[0].name}; or take every one:  --seconds {of * WORTH_A_BOOT}"
    )


def _too_few(count: int, left_out: Sequence[Boot]) -> str:
    """What is said of boot configurations that no scenario is left for."""
    names = [one.name for one in left_out]
    return (
        f"{counted(len(names), 'boot configuration')} left out, since {counted(count, 'scenario')} in all "
        f"{'is' if count == 1 else 'are'} too few: {', '.join(names)}\n"
        f"  choose by name:  --boot {names[0]}; or take every one:  --examples {count + len(names)}"
    )


def _small(console: Console, plan: Plan, result: RunResult, *, seconds: float) -> None:
    """A smaller reproducer for each failure, as far as the time lasts."""
    from harness.search.fuzz import reproducers
    from harness.search.shrink import Budget

    if not seconds:
        return
    for found, small, folder in reproducers(
        plan,
        result,
        budget=Budget(seconds=seconds),
        started=lambda found: say(console, f"making {found.signature} small, at most {seconds:g} s"),
    ):
        prompts = sum(len(request.input_ids) for request in small.requests)
        size = f"{counted(len(small.requests), 'request')}, {counted(prompts, 'prompt token')}"
        say(console, f"  in {counted(found.scenarios, 'scenario')}; the smallest now: {size}")
        say(console, f"  run it again:  eaglecheck replay {folder}")
