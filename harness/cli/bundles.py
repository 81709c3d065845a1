"""`eaglecheck engines pack` and `unpack`: what was typed, refused before anything slow where it cannot be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.cli.documents import check_target
from harness.cli.outcome import Exit, guarded
from harness.contract.usage import UsageError, unknown
from harness.engines import envs
from harness.machines.bundle import BundleError
from harness.machines.slimming import PARTS
from reports.prose import say


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
    from harness.machines.pack import pack as write_bundle
    from harness.machines.text import render_bundle

    console = Console()
    _check(output, torch=torch, python=python, part=part)
    try:
        manifest = write_bundle(
            [envs.supported(version) for version in dict.fromkeys(versions)],
            torch=torch,
            python=python,
            output=output,
            with_control=with_control,
            part=part,
            progress=lambda text: say(console, text),
        )
    except BundleError as error:
        raise UsageError(str(error)) from error
    render_bundle(console, manifest, output)
    return Exit.PASS


@guarded
def unpack(
    files: Annotated[list[Path], typer.Argument(help="Bundles made by `engines pack`.")],
    warm: Annotated[bool, typer.Option(help="Boot every release once, so that its kernels are compiled.")] = False,
    keep_kernels: Annotated[
        Path | None, typer.Option(help="Write the compiled kernels to a bundle, for the next machine like this.")
    ] = None,
) -> Exit:
    """Install the releases of a bundle on this machine, without a network."""
    from harness.machines import kernels
    from harness.machines.unpack import unpack as install_bundle

    check_target(None if keep_kernels is None else str(keep_kernels), what="keep-kernels")
    console = Console()

    def progress(text: str) -> None:
        say(console, text)

    try:
        found = [version for path in files for version in install_bundle(path, progress=progress)]
    except BundleError as error:
        raise UsageError(str(error)) from error
    if warm:
        from harness.machines.warm import warm as boot_once

        boot_once(found, progress=progress)
    if keep_kernels:
        kernels.save(keep_kernels, progress=progress)
    say(console, "look what this machine can run:  eaglecheck doctor")
    return Exit.PASS


def _check(output: Path, *, torch: str, python: str, part: str) -> None:
    """UsageError for a bundle that could not be written, an unknown part, or a torch or Python that is no version."""
    if part and part not in PARTS:
        raise UsageError(unknown("--part", part, PARTS))
    if output.is_dir() or not output.absolute().parent.is_dir():
        why = "is a folder" if output.is_dir() else "is in no folder that exists"
        raise UsageError(f"--output {output} {why}\n  name a file:  --output sglang.bundle")
    if not re.fullmatch(r"\d+\.\d+", python):
        raise UsageError(f"--python {python!r} is no version of Python\n  write it as major.minor:  --python 3.12")
    if not re.fullmatch(r"\d+(\.\d+)+\+cu\d+", torch):
        raise UsageError(
            f"--torch {torch!r} names no CUDA build of torch\n  write what the machine says to  "
            f"python3 -c 'import torch; print(torch.__version__)':  --torch 2.11.0+cu130"
        )
