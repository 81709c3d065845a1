"""`eaglecheck matrix`: corpus cases over releases, one cell a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from cases import catalogue
from harness import envs
from harness.cli import options, prepare
from harness.cli.adapt import Wanted
from harness.cli.outcome import BY_OUTCOME, Exit, UsageError, guarded
from harness.documents import cell_document, check_target, matrix_document, write_json
from harness.runner import Plan, run
from harness.types import Outcome, Verdict
from reports.findings import render_first
from reports.prose import heading, say
from reports.terminal import LiveLine, render_matrix


@guarded
def command(
    engines: Annotated[str, typer.Option(help="Releases, comma-separated.")],
    cases: Annotated[str, typer.Option(help="Corpus cases, comma-separated.")],
    revert: Annotated[
        str | None, typer.Option(help="Only with these pull requests reverted (0.5.13 and later), comma-separated.")
    ] = None,
    device: options.Device = "cpu",
    gpu_share: options.GpuShare = None,
    dtype: options.Dtype = None,
    backend: options.Backend = None,
    graphs: options.Graphs = None,
    overlap: options.Overlap = None,
    page: options.Page = None,
    runs: options.Runs = None,
    json: options.Json = None,
) -> Exit:
    """Run every case on every release and print which cells diverge, and where first.

    With --revert only the reverted cells are run. Exits 1 if any cell diverges, 3 if one is unknown.
    """
    console = Console(stderr=json == "-")
    check_target(json)
    chosen = [catalogue.load(name) for name in prepare.split_list(cases, what="cases")]
    versions = [envs.resolve(name) for name in prepare.split_list(engines, what="engines")]
    reverts = _reverts(revert)
    for version in versions:
        for one in reverts:
            prepare.check_revert(one, version)
    plans = [
        prepare.make_plan(
            [case.scenario for case in chosen],
            say=lambda text: say(console, text),
            engine=version,
            device=device,
            revert=one,
            gpu_share=gpu_share,
            wanted=Wanted(dtype=dtype, backend=backend, graphs=graphs, overlap=overlap, page=page),
            runs=runs,
        )
        for version in versions
        for one in reverts
    ]
    documents = [document for plan in plans for document in _run(plan, chosen, console=console)]
    render_matrix(console, documents)
    write_json(matrix_document(documents), json)
    return BY_OUTCOME[Verdict.merge([Outcome(document["verdict"]) for document in documents])]


def _reverts(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = prepare.split_list(text, what="revert")
    for part in parts:
        if not part.isdecimal():
            raise UsageError(
                f"--revert {part!r} is not a pull request number\n  allowed: {', '.join(map(str, prepare.REVERTS))}"
            )
    return [int(part) for part in parts]


def _engine(plan: Plan) -> str:
    return f"SGLang {plan.env.version}" + (f" with #{plan.revert} reverted" if plan.revert else "")


def _run(plan: Plan, cases: list[catalogue.Case], *, console: Console) -> list[dict[str, Any]]:
    """One engine, with or without a fix reverted: every case, sharing boots where the cases allow."""
    heading(console, _engine(plan))
    with LiveLine(console) as line:
        result = run(plan, observers=[line])
    for one in result.results:
        render_first(console, one, where=f"{one.scenario.name} on {_engine(plan)}")
    by_id = {one.scenario.id: one for one in result.results}
    ids = {case.id: scenario.id for case, scenario in zip(cases, plan.scenarios, strict=True)}
    return [
        cell_document(
            result,
            by_id[ids[case.id]],
            case=case.id,
            expected=case.expected(release=plan.env.version, revert=plan.revert),
        )
        for case in cases
    ]
