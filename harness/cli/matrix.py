"""`eaglecheck matrix`: corpus cases over releases, one cell a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cases import catalogue
from harness import envs
from harness.cli import prepare
from harness.cli.outcome import BY_OUTCOME, Exit, guarded
from harness.documents import cell_document, matrix_document, write_json
from harness.runner import Plan, run
from harness.types import Outcome, Verdict
from reports.terminal import LiveLine, render_findings, render_matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One engine, with or without a fix put back out: it runs every case, sharing boots where the cases allow."""

    env: envs.EngineEnv
    revert: int | None

    @property
    def title(self) -> str:
        return f"SGLang {self.env.version}" + (f" with {self.revert} reverted" if self.revert else "")


@guarded
def command(
    engines: Annotated[str, typer.Option(help="Releases, comma-separated.")],
    cases: Annotated[str, typer.Option(help="Corpus cases, comma-separated.")],
    revert: Annotated[
        str | None, typer.Option(help="Also with these fixes put back out (0.5.13 and later), comma-separated.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device to run the engines on.")] = "cpu",
    runs: Annotated[Path | None, typer.Option(help="Where run folders go. Default: $EAGLECHECK_RUNS, else ./runs.")] = None,
    json: Annotated[str | None, typer.Option(help="Write the cells as JSON to this file, '-' for standard output.")] = None,
) -> Exit:
    """Run every case on every release and print which cells diverge, and where first.

    With --revert only the reverted cells are run. Exits 1 if any cell diverges, 3 if one is unknown.
    """
    console = Console(stderr=json == "-")
    prepare.check_device(device)
    chosen = [catalogue.load(name) for name in prepare.split_list(cases, what="cases")]
    versions = prepare.split_list(engines, what="engines")
    reverts = _reverts(revert, versions)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    environments = [prepare.engine_environment(version, say) for version in versions]
    pairs = prepare.checkpoint_pairs([case.scenario for case in chosen], target=None, draft=None)
    columns = [_Column(env=env, revert=one) for env in environments for one in reverts]
    documents: list[dict[str, Any]] = []
    for column in columns:
        console.print(f"\n{column.title}", style="bold", highlight=False)
        documents += _run(column, chosen, pairs=pairs, root=prepare.runs_root(runs), device=device, console=console)
    render_matrix(console, documents)
    if json is not None:
        write_json(matrix_document(documents), json)
    return BY_OUTCOME[Verdict.merge([Outcome(document["verdict"]) for document in documents])]


def _reverts(text: str | None, versions: list[str]) -> list[int | None]:
    if text is None:
        return [None]
    numbers: list[int | None] = []
    for part in prepare.split_list(text, what="revert"):
        if not part.isdigit():
            raise prepare.UsageError(f"--revert {part!r} is not a pull request number")
        for version in versions:
            prepare.check_revert(int(part), version)
        numbers.append(int(part))
    return numbers


def _run(
    column: _Column,
    cases: list[catalogue.Case],
    *,
    pairs: dict[str, tuple[Path, Path]],
    root: Path,
    device: str,
    console: Console,
) -> list[dict[str, Any]]:
    plan = Plan(
        env=column.env,
        scenarios=tuple(case.scenario for case in cases),
        pairs=pairs,
        root=root,
        device=device,
        revert=column.revert,
        argv=tuple(sys.argv),
    )
    with LiveLine(console) as line:
        result = run(plan, observers=[line])
    render_findings(console, result.results, most=3)
    by_id = {one.scenario.id: one for one in result.results}
    return [
        cell_document(
            result,
            by_id[case.scenario.id],
            case=case.id,
            expected=case.expected(release=column.env.version, revert=column.revert),
        )
        for case in cases
    ]
