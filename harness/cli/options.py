"""Options that several commands share, with SGLang's names where it has one. It must not read or check their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or one scenario's or reproducer's folder in it.")
]
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
BootsAhead = Annotated[
    int | None,
    typer.Option(
        "--boots-ahead",
        min=0,
        max=16,
        help="Engines that boot while another one is driven. Default: 3 on a GPU, none on a CPU.",
    ),
]
Spawn = Annotated[
    bool,
    typer.Option(
        "--spawn",
        help="Start every process as SGLang does, instead of copying one that has imported it, which is quicker.",
    ),
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Device to run engines on.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts", help="Text, a prompt a line or paragraph, or JSON lines; goes through the tokenizer of --target."
    ),
]
Runs = Annotated[
    Path | None, typer.Option("--runs", help="Where run folders go. Default: $EAGLECHECK_RUNS, else ./runs.")
]
Json = Annotated[
    str | None, typer.Option("--json", help="Write the result as JSON to this file, '-' for standard output.")
]
Target = Annotated[
    Path | None, typer.Option("--target", "--model-path", help="Target checkpoint folder instead of the tiny one.")
]
Draft = Annotated[
    Path | None,
    typer.Option("--draft", "--speculative-draft-model-path", help="Draft checkpoint folder that goes with --target."),
]
Reference = Annotated[
    Literal["auto", "paper", "transformers", "witness"],
    typer.Option(
        "--reference",
        help="Who says what rows should hold: paper (our own modules), transformers (Hugging Face's target), witness "
        "(the same SGLang, one plain request at a time), or auto: the first that knows the pair.",
    ),
]
ReferenceDevice = Annotated[
    str,
    typer.Option(
        "--reference-device",
        help="Where the paper reference computes: cpu, cuda, cuda:N, or auto: the engine's card where a pair of your "
        "own fits beside it.",
    ),
]
Replayed = Annotated[
    Literal["auto", "paper", "transformers", "witness"] | None,
    typer.Option("--reference", help="As of `run`. Default: who judged the reproducer."),
]
Family = Annotated[
    str | None,
    typer.Option("--family", help="The scenarios of this draft family, for example tree, instead of the default ones."),
]
Assume = Annotated[
    list[str] | None,
    typer.Option("--assume", help="Predict this known issue of SGLang, for example F-003; may be repeated."),
]
Known = Annotated[
    Path | None, typer.Option("--known", help="Known findings, a TOML file. Default: those of docs/findings.")
]
