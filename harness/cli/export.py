"""`eaglecheck export`: a stored failure as one Python file that needs SGLang and nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from harness.archive.again import run_again
from harness.archive.records import RunManifest
from harness.archive.run_folders import MANIFEST, SHOWN, whole
from harness.archive.store import SCENARIO, StoredScenario, read_case, read_model, reproducers_in
from harness.cli.outcome import Exit, guarded
from harness.cli.replay import newest_reproducers
from harness.contract.known_issues import assumed_in
from harness.contract.outputs import check_target, write_text
from harness.contract.usage import UsageError
from harness.driving.judging import judge_scenario
from harness.driving.plan import Setup
from harness.driving.results import ScenarioResult
from harness.engines import envs
from harness.engines.launch import build_launch
from reports.prose import say


@guarded
def command(
    reproducer: Annotated[
        Path, typer.Argument(metavar="REPRODUCER", help="A reproducer, or a scenario's folder in a run that failed.")
    ],
    output: Annotated[str, typer.Option(metavar="FILE", help="The file to write; '-': standard output.")] = "repro.py",
    form: Annotated[
        Literal["script", "sglang-test"],
        typer.Option("--format", help="A script that exits 1 where the fault is there, or a test as SGLang has them."),
    ] = "script",
) -> Exit:
    """Write a stored failure as one Python file.

    It needs SGLang and torch only: it makes the checkpoint, starts sglang.Engine, drives the requests in the order that
    shows the fault, prints what is expected and observed, and exits 1 where the fault is there.
    """
    from harness.search.export import exported  # it reads the sources of what makes a pair

    check_target(output, option="output", runs=[whole(reproducer)])
    _check_reproducer(reproducer)
    stored = read_case(reproducer)
    one, engine = _judged(reproducer, stored), stored.scenario.engine
    if not stored.engine.header:  # what does not boot needs no other engine
        engine = engine.model_copy(update={"disaggregation": False})
    launch = build_launch(
        env=envs.EngineEnv(version=one.setup.release, python=Path("python"), pythonpath=(), torch="", ready=True),
        spec=stored.scenario.spec,
        engine=engine,
        target=Path("target"),
        draft=Path("draft"),
        device=one.setup.device,
        revert=one.setup.revert,
        cpu_attention="interpreted",
    )
    write_text(exported(one, launch, name=Path(output).name, form=form), output, option="output")
    if output != "-":
        say(Console(), f"written: {output}\nrun it:  {_run_line(one.setup.release, output)}")
        say(Console(), f"the whole scenario:  {run_again(reproducer)}")
    return Exit.PASS


def _run_line(release: str, output: str) -> str:
    """What runs the file: the engine's own Python where this machine has that release."""
    env = envs.state(release)
    if not env.ready:
        return f"python {output}, with a Python that has SGLang {release}"
    path = ":".join(map(str, env.pythonpath))
    return f"PYTHONPATH={path} {env.python} {output}" if path else f"{env.python} {output}"


def _judged(folder: Path, stored: StoredScenario) -> ScenarioResult:
    """A stored scenario; of an engine that never came up, what its run said of it."""
    header = stored.engine.header
    if not header and (folder.parent / MANIFEST).is_file():
        header = read_model(folder.parent / MANIFEST, RunManifest).engine.model_dump(exclude_none=True)
    setup = Setup.told(header, assumed=assumed_in({} if stored.reference is None else stored.reference.header))
    places: dict[str, Any] = {"setup": setup, "folder": folder, "reproducer": folder}
    if stored.engine.header or stored.verdict is None:
        return judge_scenario(stored.scenario, stored.engine, stored.reference, **places)
    verdict = stored.verdict.verdict()
    return ScenarioResult.of(stored.scenario, stored.engine, stored.reference, verdict, (), **places)


def _check_reproducer(folder: Path) -> None:
    """UsageError for what is not the folder of one scenario, with what can be exported."""
    if (folder / SCENARIO).is_file():
        return
    found = reproducers_in(folder)
    if found:
        lines = "".join(f"\n  eaglecheck export {path}" for path in found[:SHOWN])
        raise UsageError(f"{folder} is a run, and one file shows one failure of it ({len(found)} here){lines}")
    if (folder / MANIFEST).exists():
        why = f"{folder} is a run without a failure: there is nothing to export"
    elif folder.is_dir():
        why = f"{folder} is neither a reproducer nor a scenario's folder: it has no {SCENARIO}"
    elif folder.exists():
        why = f"{folder} is a file, not a reproducer folder"
    else:
        why = f"there is no folder {folder}: looked for a reproducer"
    raise UsageError(
        f"{why}\n  {newest_reproducers(None)}\n  one that fails:  eaglecheck run --engine 0.5.11 --scenario pr25015"
    )
