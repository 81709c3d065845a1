"""`eaglecheck engines …` and `eaglecheck doctor`: what is installed, what this machine can run, and how to mend it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness import envs
from harness.cli.outcome import Exit, guarded

engines = typer.Typer(help="Engine environments: one SGLang release each, over one shared set of dependencies.", no_args_is_help=True)


@engines.command("install")
@guarded
def install(versions: Annotated[list[str], typer.Argument(help="Releases, for example 0.5.13.")]) -> Exit:
    """Install the environments of the named releases; resumes what was interrupted."""
    console = Console()
    for version in versions:
        env = envs.ensure(version, lambda text: console.print(text, highlight=False, markup=False))
        console.print(f"SGLang {env.version} is ready (torch {env.torch})", highlight=False)
    return Exit.PASS


@engines.command("list")
@guarded
def list_() -> Exit:
    """Every release that can be used here, and whether it is installed."""
    console = Console()
    table = Table()
    for heading in ("release", "state", "torch"):
        table.add_column(heading)
    here = envs.current()
    if here is not None:
        table.add_row(f"{here.version} (this environment)", "ready", here.torch)
    for version in envs.SUPPORTED:
        env = envs.state(version)
        table.add_row(version, "ready" if env.ready else env.why, env.torch)
    console.print(table)
    console.print("install one:  eaglecheck engines install VERSION", highlight=False)
    return Exit.PASS


@guarded
def doctor() -> Exit:
    """What this machine can run, what is missing, and the command that mends it. Exits 3 if a run is impossible."""
    from harness.doctor import diagnose

    console = Console()
    table = Table(show_lines=False)
    for heading in ("what", "state", "detail", "to mend it, type"):
        table.add_column(heading, overflow="fold")
    style = {"ok": "green", "warn": "yellow", "missing": "bold red"}
    found = diagnose()
    for finding in found:
        state = str(finding.status)
        table.add_row(finding.name, f"[{style.get(state, '')}]{state}[/]", finding.detail, finding.mend)
    console.print(table)
    return Exit.UNKNOWN if any(str(finding.status) == "missing" for finding in found) else Exit.PASS
