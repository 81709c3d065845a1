"""`eaglecheck engines …` and `eaglecheck doctor`: what is installed, what this machine can run, and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.cli.outcome import Exit, guarded
from harness.contract.outputs import check_target
from harness.contract.usage import UsageError, unknown
from harness.engines import envs
from harness.engines.releases import named
from harness.machines.bundle_contents import PARTS
from reports.prose import say

engines = typer.Typer(
    rich_markup_mode=None, help="Install, list, pack and unpack SGLang releases.", no_args_is_help=True
)


@engines.command("pack")
@guarded
def pack(
    versions: Annotated[list[str], typer.Argument(metavar="VERSIONS...", help="Releases, for example 0.5.13.")],
    output: Annotated[Path, typer.Option(help="The bundle to write.")],
    torch: Annotated[str, typer.Option(help="The torch of the machine it is for, with its build.")] = "2.11.0+cu130",
    python: Annotated[str, typer.Option(help="The Python of that machine.")] = "3.12",
    with_torch: Annotated[
        bool, typer.Option("--with-torch", help="Carry the torch of releases that pin another than that machine's.")
    ] = False,
    cards: Annotated[int, typer.Option(min=1, help="With --with-torch: for 2 or more, NCCL too.")] = 1,
    split: Annotated[str, typer.Option(help="Write files of at most this size, for example 60M.")] = "",
    part: Annotated[
        str, typer.Option(help="Pack only what the releases' bundle leaves out: 'flashinfer' or 'fa3'.")
    ] = "",
    with_: Annotated[
        list[str] | None, typer.Option("--with", help="Pack a part with the releases: 'flashinfer', 'fa3'; repeatable.")
    ] = None,
) -> Exit:
    """Pack releases into a file for a machine without a network.

    That machine has torch and a Hopper card.
    """
    from harness.machines.pack import pack as write_bundle
    from harness.machines.text import render_bundle

    console = Console()
    parts = [("--part", part), *(("--with", one) for one in with_ or ())]
    limit = _check(output, torch=torch, python=python, parts=parts, split=split)
    manifest = write_bundle(
        [named(version) for version in dict.fromkeys(versions)],
        torch=torch,
        python=python,
        output=output,
        part=part,
        include=with_ or (),
        with_torch=with_torch,
        cards=cards,
        limit=limit,
        progress=lambda text: say(console, text),
    )
    render_bundle(console, manifest, output)
    return Exit.PASS


@engines.command("unpack")
@guarded
def unpack(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Bundles made by `engines pack`.")],
    warm: Annotated[bool, typer.Option(help="Boot every release once, so that its kernels are compiled.")] = False,
    keep_kernels: Annotated[
        Path | None, typer.Option(help="Write the compiled kernels to a bundle, for the next machine like this.")
    ] = None,
) -> Exit:
    """Install the releases of a packed file, without a network."""
    from harness.machines import kernels
    from harness.machines.unpack import unpack as install_bundle

    check_target(keep_kernels, option="keep-kernels", piped=False)
    console = Console()

    def progress(text: str) -> None:
        say(console, text)

    found = install_bundle(*files, progress=progress, warm=warm)
    if warm:
        from harness.machines.warm import warm as boot_once

        boot_once(found, progress=progress)
    if keep_kernels:
        kernels.save(keep_kernels, progress=progress)
    say(console, "see what this machine can run:  eaglecheck doctor")
    return Exit.PASS


def _check(output: Path, *, torch: str, python: str, parts: Sequence[tuple[str, str]], split: str) -> int:
    """The bytes that a file may have, 0 for any number. UsageError for a bundle that could not be written, an unknown
    part, or a size, torch or Python that is none."""
    for option, part in parts:
        if part and part not in PARTS:
            raise UsageError(unknown(option, part, PARTS))
    if split and not re.fullmatch(r"[1-9]\d*[MG]", split):
        raise UsageError(f"--split {split!r} is not a size\n  write it in MiB or GiB:  --split 60M")
    check_target(output, option="output", piped=False)
    if not re.fullmatch(r"3\.1[1-9]", python):
        raise UsageError(
            f"--python {python!r} is not a version of Python that eaglecheck runs on\n"
            "  allowed: 3.11 or newer, as major.minor:  --python 3.12"
        )
    if not re.fullmatch(r"\d+(\.\d+)+\+cu\d+", torch):
        raise UsageError(
            f"--torch {torch!r} is not a CUDA build of torch\n  write what that machine prints for  "
            f"python3 -c 'import torch; print(torch.__version__)':  --torch 2.11.0+cu130"
        )
    return int(split[:-1] or 0) * (2**30 if split.endswith("G") else 2**20)


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
