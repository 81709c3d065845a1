"""`eaglecheck export`: a stored failure as one Python file that needs SGLang and nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from harness.archive.again import run_again
from harness.archive.run_folders import whole
from harness.archive.store import SCENARIO, read_case
from harness.cli.outcome import Exit, guarded
from harness.contract.known_issues import assumed_in
from harness.contract.outputs import check_target, write_text
from harness.contract.usage import UsageError
from harness.driving.judging import judge_scenario
from harness.driving.progress import Setup
from harness.engines import envs
from harness.engines.launch import build_launch
from reports.prose import say


@guarded
def command(
    specimen: Annotated[
        Path, typer.Argument(metavar="SPECIMEN", help="A reproducer, or a scenario's folder in a run that failed.")
    ],
    output: Annotated[str, typer.Option(help="The file to write; '-': standard output.")] = "repro.py",
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

    check_target(output, option="output", runs=[whole(specimen)])
    if not (specimen / SCENARIO).is_file():
        raise UsageError(
            f"{specimen} is no scenario's folder: it has no {SCENARIO}\n  look:  eaglecheck recheck {specimen}"
        )
    stored = read_case(specimen)
    header = stored.engine.header
    setup = Setup(
        release=str(header["release"]),
        device=str(header.get("device", "cpu")),
        revert=header.get("revert"),
        assumed=assumed_in({} if stored.reference is None else stored.reference.header),
        pair=tuple(header["pair"]) if header.get("pair") else None,
    )
    one = judge_scenario(
        stored.scenario, stored.engine, stored.reference, setup=setup, folder=specimen, reproducer=specimen
    )
    env = envs.EngineEnv(version=setup.release, python=Path("python"), pythonpath=(), torch="", ready=True)
    launch = build_launch(
        env=env,
        spec=stored.scenario.spec,
        engine=stored.scenario.engine,
        target=Path("target"),
        draft=Path("draft"),
        device=setup.device,
        revert=setup.revert,
        cpu_attention="interpreted",
    )
    write_text(exported(one, launch, name=Path(output).name, form=form), output, option="output")
    if output != "-":
        say(Console(), f"written: {output}\nthe whole scenario:  {run_again(specimen)}")
    return Exit.PASS
