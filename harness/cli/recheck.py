"""`eaglecheck recheck`: judge a stored run again, without an engine and without SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harness.checks.findings import group
from harness.checks.judge import judge
from harness.cli import prepare
from harness.cli.outcome import BY_OUTCOME, Exit, UsageError, guarded
from harness.documents import run_document, write_json
from harness.progress import Cost, RunResult, ScenarioResult
from harness.runner import merge
from harness.store import SCENARIO, RunReader, StoredScenario, read_case
from harness.trace import Trace
from reports.terminal import render_run


@guarded
def command(
    run: Annotated[Path, typer.Argument(help="A run folder, or one scenario's or specimen's folder in it.")],
    fresh_reference: Annotated[
        bool, typer.Option(help="Compute the reference anew instead of using the stored one.")
    ] = False,
    json: Annotated[str | None, typer.Option(help="Write the result as JSON to this file, '-' for standard output.")] = None,
) -> Exit:
    """Judge the traces of RUN with this version's checks; nothing in the folder is changed."""
    console = Console(stderr=json == "-")
    folder, stored, device, revert = _open(run)
    if not stored:
        raise UsageError(f"run {run} holds no scenario: it ended before the first one was judged\n  run again:  eaglecheck run")
    results = tuple(_rejudge(one, fresh_reference=fresh_reference) for one in stored)
    header = dict(stored[0].engine.header)
    result = RunResult(
        folder=folder,
        engine=str(header.get("release", "unknown")),
        device=device,
        revert=revert,
        header=header,
        results=results,
        verdict=merge([one.verdict for one in results]),
        cost=Cost(),
    )
    render_run(console, result)
    if json is not None:
        write_json(run_document(result), json)
    return BY_OUTCOME[result.verdict.outcome]


def _open(path: Path) -> tuple[Path, list[StoredScenario], str, int | None]:
    if (path / SCENARIO).is_file():
        case = read_case(path)
        return path, [case], str(case.engine.header.get("device", "unknown")), case.engine.header.get("revert")
    reader = RunReader.open(path, allow_incomplete=True)
    engine: dict[str, Any] = reader.manifest.engine
    return reader.folder, list(reader.scenarios()), str(engine.get("device", "unknown")), engine.get("revert")


def _rejudge(stored: StoredScenario, *, fresh_reference: bool) -> ScenarioResult:
    from harness.oracle import text_identical

    reference = _reference(stored) if fresh_reference else stored.reference
    verdict, divergences = judge(stored.scenario, stored.engine, reference)
    if not stored.engine.header and stored.verdict is not None:
        verdict = stored.verdict.verdict()  # the engine never came up: the reason it gave then still stands
    return ScenarioResult(
        scenario=stored.scenario,
        verdict=verdict,
        divergences=tuple(divergences),
        findings=tuple(group(divergences)),
        folder=stored.folder,
        specimen=None,
        text_identical=None if reference is None else text_identical(stored.engine, reference),
        rounds=len(stored.engine.rounds),
        draft_steps=sum(record.forwards.get("DRAFT", 0) for record in stored.engine.rounds),
        seconds={},
    )


def _reference(stored: StoredScenario) -> Trace:
    from harness.oracle import Oracle

    pairs = prepare.checkpoint_pairs([stored.scenario], target=None, draft=None)
    target, draft = pairs[stored.scenario.checkpoint]
    return Oracle(target=target, draft=draft).load().answer(stored.scenario, stored.engine)
