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
GpuShare = Annotated[
    float | None,
    typer.Option(
        "--gpu-share",
        metavar="GIB",
        help="Memory of a GPU that one engine leases, in GiB. Default: $EAGLECHECK_GPU_SHARE, else 4.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="Device to run engines on: cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Engine dtype; on a GPU float16 (default) or bfloat16.")]
Backend = Annotated[
    str | None, typer.Option("--backend", help="Attention backend: triton; on a GPU also flashinfer or fa3.")
]
Graphs = Annotated[bool | None, typer.Option("--graphs/--no-graphs", help="Run decoding in CUDA graphs or eagerly.")]
Overlap = Annotated[bool | None, typer.Option("--overlap/--no-overlap", help="Overlap scheduling on or off.")]
Page = Annotated[int | None, typer.Option("--page", help="Tokens a KV page holds.")]
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
    typer.Option("--assume", help="Expect this known issue of SGLang, for example F-003; may be repeated."),
]
Known = Annotated[
    Path | None,
    typer.Option("--known", help="Known findings, a TOML file. Default: those of docs/findings."),
]
