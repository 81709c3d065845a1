"""`eaglecheck matrix`: corpus cases over releases, one cell a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cases import catalogue
from harness.checks.findings import kinds
from harness.cli import options, prepare
from harness.cli.documents import cell_document, matrix_document
from harness.cli.night_plan import Asked
from harness.cli.nightly import run_night
from harness.cli.outcome import BY_OUTCOME, Exit, guarded, kept
from harness.contract.outputs import check_target, write_json
from harness.contract.usage import UsageError
from harness.driving.adapt import NOTHING, Wanted
from harness.driving.plan import Plan
from harness.driving.results import Interrupted, RunResult
from harness.driving.runner import run
from harness.engines import envs
from reports.findings import render_first
from reports.live import LiveLine
from reports.matrix import render_matrix
from reports.prose import heading, say


@guarded
@options.takes_settings(options.OF_KERNELS)
def command(
    engines: Annotated[
        str | None, typer.Option(help="Releases, comma-separated. Default of a night: the newest.")
    ] = None,
    cases: Annotated[str | None, typer.Option(help="Corpus cases, comma-separated; with --nights also 'all'.")] = None,
    families: Annotated[
        str | None, typer.Option(help="Draft families, comma-separated, or 'all'; needs --nights.")
    ] = None,
    nights: Annotated[
        Path | None, typer.Option(help="Run a night: store it in this folder and compare it with the nights there.")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="Only this part of the night, for example 2/3.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=512, help="Night: processes that drive its cells side by side. Default: 1.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with a night or shard of that folder that was cut off, by its id.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Night: seconds for each family's generated scenarios. Default: 600.")
    ] = None,
    scenarios: Annotated[
        int | None,
        typer.Option(min=0, max=100_000, help="Night: most generated scenarios a family, 0 for none. Default: 120."),
    ] = None,
    mutants: Annotated[
        int | None, typer.Option(min=0, help="Night: mutants of SGLang's source a family, on a CPU. Default: 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Night: seed of what is generated. Default: random.")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=0, max=60, help="Night: times a failing scenario is run again. Default: 2.")
    ] = None,
    known_file: options.Known = None,
    revert: Annotated[
        str | None, typer.Option(help="Only with these pull requests reverted (0.5.13 and later), comma-separated.")
    ] = None,
    device: options.Device = "cpu",
    gpu_share: options.GpuShare = None,
    boots_ahead: options.BootsAhead = None,
    wanted: Wanted = NOTHING,
    runs: options.Runs = None,
    json: options.Json = None,
) -> Exit:
    """Run corpus cases on several releases, or a whole night.

    Prints which cells diverge, and where first. With --revert only the reverted cells are run.
    Exits 0 if every cell is as its release window says, failures too; 1 if one is not, or diverges where nothing is
    expected; 3 if one is unknown.
    With --nights: cases and whole families, judged against what is known and the nights before (docs/nightly.md).
    """
    console = Console(stderr=json == "-")
    check_target(json)
    reverts = _reverts(revert)
    of_nights: dict[str, Any] = {"families": families, "shard": shard, "known": known_file, "seed": seed}
    of_nights |= {"resume": resume, "jobs": jobs, "seconds": seconds, "scenarios": scenarios, "mutants": mutants}
    of_nights["repeats"] = repeats
    given = {option: value for option, value in of_nights.items() if value is not None}
    if nights is not None:
        asked = Asked(
            nights=nights,
            engines=engines,
            cases=cases,
            device=device,
            revert=_one_of(reverts),
            gpu_share=gpu_share,
            boots_ahead=boots_ahead,
            wanted=wanted,
            **given,
        )
        return run_night(asked, console=console, json=json)
    for option in given:
        raise UsageError(f"--{option} needs --nights\n  name a store too:  --nights FOLDER")
    versions = [envs.resolve(name) for name in _named("engines", engines, allowed=envs.choices())]
    chosen = [catalogue.load(name) for name in _named("cases", cases, allowed=", ".join(catalogue.names()))]
    plans = [
        (
            together,
            prepare.make_plan(
                [case.scenario for case in together],
                say=lambda text: say(console, text),
                engine=version,
                device=device,
                revert=one,
                gpu_share=gpu_share,
                boots_ahead=boots_ahead,
                wanted=wanted,
                runs=runs,
                assumed=together[0].assumes,
            ),
        )
        for version, one in _checked(versions, reverts)
        for together in _with_same_assumptions(chosen)
    ]
    documents: list[dict[str, Any]] = []
    printed: set[str] = set()
    with kept(json, lambda _stop: matrix_document(documents)):
        for together, plan in plans:
            _run(plan, together, documents, console=console, printed=printed)
    render_matrix(console, documents)
    write_json(matrix_document(documents), json)
    return BY_OUTCOME[catalogue.outcome_of(documents)]


def _named(option: str, text: str | None, *, allowed: str) -> list[str]:
    if text is None:
        raise UsageError(f"--{option} is missing\n  allowed, comma-separated: {allowed}")
    return prepare.split_list(text, option=option)


def _checked(versions: Sequence[str], reverts: Sequence[int | None]) -> list[tuple[str, int | None]]:
    """Every pair, all of them refused before the first is planned: that may install a release."""
    pairs = [(version, one) for version in versions for one in reverts]
    for version, one in pairs:
        prepare.check_revert(one, version)
    return pairs


def _with_same_assumptions(cases: Sequence[catalogue.Case]) -> list[list[catalogue.Case]]:
    """Cases that can share a run, in their order."""
    return [[case for case in cases if case.assumes == one] for one in dict.fromkeys(case.assumes for case in cases)]


def _one_of(reverts: Sequence[int | None]) -> int | None:
    """A night is of one engine build: at most one pull request is reverted in all of it."""
    if len(reverts) > 1:
        raise UsageError("--revert: a night reverts one pull request in every cell\n  allowed: one number")
    return reverts[0]


def _reverts(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = prepare.split_list(text, option="revert")
    for part in parts:
        if not part.isdecimal():
            allowed = ", ".join(map(str, prepare.REVERTS))
            raise UsageError(f"--revert {part!r} is not a pull request number\n  allowed: {allowed}")
    return [int(part) for part in parts]


def _engine(plan: Plan) -> str:
    return f"SGLang {plan.env.version}" + (f" with #{plan.setup.revert} reverted" if plan.setup.revert else "")


def _run(
    plan: Plan, cases: list[catalogue.Case], documents: list[dict[str, Any]], *, console: Console, printed: set[str]
) -> None:
    """One engine, with or without a fix reverted: every case, sharing boots where the cases allow; adds its cells."""
    heading(console, _engine(plan))
    try:
        with LiveLine(console) as line:
            result = run(plan, observers=[line])
    except Interrupted as stop:
        documents += _cells(stop.result, plan, cases)
        raise
    for one in result.results:
        render_first(console, one, where=f"{one.scenario.name} on {_engine(plan)}", printed=printed)
    documents += _cells(result, plan, cases)


def _cells(result: RunResult, plan: Plan, cases: list[catalogue.Case]) -> list[dict[str, Any]]:
    """A cell for each case that was judged, in the order of the cases."""
    by_id = {one.scenario.id: one for one in result.results}
    found = []
    for case, scenario in zip(cases, plan.scenarios, strict=True):
        if (one := by_id.get(scenario.id)) is None:
            continue
        expected = case.expected(release=plan.env.version, revert=plan.setup.revert, device=plan.setup.device)
        other = kinds((found for found in one.findings if found.signature not in one.known), roots_only=True)
        met = case.as_expected(expected, one.verdict.outcome, one.verdict.root_kinds, unexplained=other)
        found.append(cell_document(result, one, case=case.id, expected=expected, as_expected=met))
    return found
