"""`eaglecheck engines …` and `eaglecheck doctor`: what is installed, what this machine can run, and how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness import envs
from harness.cli.outcome import Exit, guarded
from reports.prose import say

engines = typer.Typer(
    help="Engine environments: one SGLang release each, over one shared set of dependencies.", no_args_is_help=True
)


@engines.command("install")
@guarded
def install(versions: Annotated[list[str], typer.Argument(help="Releases, for example 0.5.13.")]) -> Exit:
    """Install the environments of the named releases; resumes what was interrupted."""
    console = Console()
    for version in [envs.resolve(version) for version in versions]:
        env = envs.ensure(version, lambda text: say(console, text))
        say(console, f"SGLang {env.version} is ready (torch {env.torch})")
    return Exit.PASS


@engines.command("pack")
@guarded
def pack(
    versions: Annotated[list[str], typer.Argument(help="Releases, for example 0.5.13.")],
    output: Annotated[Path, typer.Option(help="The bundle to write.")],
    torch: Annotated[str, typer.Option(help="The torch of the machine it is for, with its build.")] = "2.11.0+cu130",
    python: Annotated[str, typer.Option(help="The Python of that machine.")] = "3.12",
    part: Annotated[
        str, typer.Option(help="Instead, what the releases' own bundle leaves out: 'flashinfer' or 'fa3'.")
    ] = "",
    with_control: Annotated[
        bool, typer.Option("--with-control/--engines-only", help="Also what the test suite needs there.")
    ] = True,
) -> Exit:
    """Put releases into one small file for a machine without a network that has torch and a Hopper card."""
    from harness.cli.prepare import check_bundle_target
    from harness.pack import pack as write_bundle
    from reports.machine import render_bundle

    console = Console()
    check_bundle_target(output, torch=torch, python=python, part=part)
    manifest = write_bundle(
        [envs.supported(version) for version in dict.fromkeys(versions)],
        torch=torch,
        python=python,
        output=output,
        with_control=with_control,
        part=part,
        progress=lambda text: say(console, text),
    )
    render_bundle(console, manifest, output)
    return Exit.PASS


@engines.command("unpack")
@guarded
def unpack(
    files: Annotated[list[Path], typer.Argument(help="Bundles made by `engines pack`.")],
    warm: Annotated[bool, typer.Option(help="Boot every release once, so that its kernels are compiled.")] = False,
    keep_kernels: Annotated[
        Path | None, typer.Option(help="Write the compiled kernels to a bundle, for the next machine like this.")
    ] = None,
) -> Exit:
    """Install the releases of a bundle on this machine, without a network."""
    from harness import kernels
    from harness.unpack import unpack as install_bundle

    console = Console()
    found = [version for path in files for version in install_bundle(path, progress=lambda text: say(console, text))]
    if warm:
        from harness.warm import warm as boot_once

        boot_once(found, progress=lambda text: say(console, text))
    if keep_kernels:
        kernels.save(keep_kernels, progress=lambda text: say(console, text))
    say(console, "look what this machine can run:  eaglecheck doctor")
    return Exit.PASS


@engines.command("list")
@guarded
def list_() -> Exit:
    """Every release that can be used here, and whether it is installed."""
    from reports.machine import render_engines

    render_engines(Console(), [envs.state(version) for version in envs.SUPPORTED], here=envs.current())
    return Exit.PASS


@guarded
def doctor() -> Exit:
    """What this machine can run, what is missing, and the command that mends it. Exits 3 if a run is impossible."""
    from harness.doctor import diagnose, first_run_installs
    from reports.machine import render_doctor

    found = diagnose()
    installs = first_run_installs(found)
    render_doctor(Console(), found, first_run_installs=installs)
    return Exit.PASS if installs else Exit.UNKNOWN
