"""Options that several commands share, with one help text each. This module must not read or check their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Release = Annotated[
    str | None,
    typer.Option(
        "--engine", help="SGLang release, for example 0.5.13. Default: the one installed here, else the newest."
    ),
]
Device = Annotated[str, typer.Option("--device", help="Device to run engines on.")]
GpuShare = Annotated[
    float | None,
    typer.Option(
        "--gpu-share",
        metavar="GIB",
        help="Memory of a GPU that one engine leases, in GiB. Default: $EAGLECHECK_GPU_SHARE, else 4.",
    ),
]
Runs = Annotated[
    Path | None, typer.Option("--runs", help="Where run folders go. Default: $EAGLECHECK_RUNS, else ./runs.")
]
Json = Annotated[
    str | None, typer.Option("--json", help="Write the result as JSON to this file, '-' for standard output.")
]
Target = Annotated[Path | None, typer.Option("--target", help="Target checkpoint folder instead of the tiny one.")]
Draft = Annotated[Path | None, typer.Option("--draft", help="Draft checkpoint folder that goes with --target.")]
Family = Annotated[
    str | None,
    typer.Option("--family", help="The scenarios of this draft family, for example tree, instead of the default ones."),
]
Assume = Annotated[
    list[str] | None,
    typer.Option("--assume", help="Predict this known deviation of SGLang, for example F-003; may be repeated."),
]
