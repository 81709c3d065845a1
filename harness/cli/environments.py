"""`eaglecheck engines …` and `eaglecheck doctor`: what is installed, what this machine can run, and how to fix it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from harness.cli import bundles
from harness.cli.outcome import Exit, guarded
from harness.engines import envs
from reports.prose import say

engines = typer.Typer(
    rich_markup_mode=None, help="Install, list, pack and unpack SGLang releases.", no_args_is_help=True
)


engines.command("pack")(bundles.pack)
engines.command("unpack")(bundles.unpack)


@engines.command("install")
@guarded
def install(
    versions: Annotated[list[str], typer.Argument(metavar="VERSIONS...", help="Releases, for example 0.5.13.")],
) -> Exit:
    """Install releases.

    Any published one since 0.5.11; an interrupted installation is resumed.
    """
    console = Console()
    for version in [envs.resolve(version) for version in versions]:
        env = envs.ensure(version, lambda text: say(console, text))
        standing = envs.standing(env.version)
        say(console, f"SGLang {env.version} is ready (torch {env.torch})" + (f"; {standing}" if standing else ""))
    return Exit.PASS


@engines.command("list")
@guarded
def list_() -> Exit:
    """List the releases of our tests and all others installed here."""
    from harness.machines.text import render_engines

    here, others = envs.current(), [one.version for one in envs.list_installed() if one.version not in envs.SUPPORTED]
    rows = [(envs.state(version), envs.standing(version)) for version in (*envs.SUPPORTED, *others)]
    if here is not None:
        rows.insert(0, (here, "; ".join(filter(None, ["in this environment", envs.standing(here.version)]))))
    render_engines(Console(), rows)
    return Exit.PASS


@guarded
def doctor() -> Exit:
    """Show what this machine can run and how to fix what is missing.

    Exits 3 if a run is impossible.
    """
    from harness.machines.doctor import diagnose, first_run_installs
    from harness.machines.text import render_doctor

    found = diagnose()
    installs = first_run_installs(found)
    render_doctor(Console(), found, first_run_installs=installs)
    return Exit.PASS if installs else Exit.UNKNOWN
