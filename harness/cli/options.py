"""Options that several commands share, with SGLang's names where it has one; its own settings come as one `Wanted`.

It must not read or check what their values name.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from harness.contract.allowed import Place
from harness.contract.settings import EngineConfig
from harness.driving.adapt import Wanted
from harness.engines import server_args

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
        help="Engines that boot while another one is driven. Default: 8 on a GPU, or half the cores if fewer; "
        "none on a CPU.",
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
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON to this file, '-' for standard output."),
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

#: The fields of `Wanted`, each an option.
SETTINGS: dict[str, Any] = {
    "dtype": typer.Option("--dtype", help="Engine dtype; on a GPU float16 (default) or bfloat16."),
    "attention_backend": typer.Option(
        "--attention-backend", "--backend", help="Attention: triton; on a GPU also flashinfer, fa3 or dsa."
    ),
    "cuda_graph": typer.Option(
        "--cuda-graph/--disable-cuda-graph", "--graphs/--no-graphs", help="Decode in CUDA graphs, or eagerly."
    ),
    "prefill_cuda_graph": typer.Option(
        "--prefill-cuda-graph/--disable-prefill-cuda-graph",
        help="With --cuda-graph: prompts in CUDA graphs too, as newer releases run by default, or eagerly (default).",
    ),
    "overlap_schedule": typer.Option(
        "--overlap-schedule/--disable-overlap-schedule", "--overlap/--no-overlap", help="Overlap scheduling on or off."
    ),
    "enable_overlap_plan_stream": typer.Option(
        "--enable-overlap-plan-stream/--disable-overlap-plan-stream",
        help="On a GPU: verifies are planned in a stream of their own, or not (default).",
    ),
    "page_size": typer.Option("--page-size", "--page", help="Tokens a KV page holds."),
    "context_length": typer.Option(
        "--context-length", help="Tokens a request may grow to. Default: the scenario's, 512."
    ),
    "chunked_prefill_size": typer.Option(
        "--chunked-prefill-size", help="Prompt tokens a batch. Default: the scenario's."
    ),
    "max_running_requests": typer.Option("--max-running-requests", help="Requests a batch at most."),
    "max_total_tokens": typer.Option("--max-total-tokens", help="KV slots of the engine, for all its requests."),
    "cuda_graph_max_bs": typer.Option(
        "--cuda-graph-max-bs", help="Largest batch with a CUDA graph. Default: graphs of 1, 2, 4."
    ),
    "mem_fraction_static": typer.Option(
        "--mem-fraction-static", help="Share of the device for weights and KV cache. Default: 0.5."
    ),
    "trust_remote_code": typer.Option(
        "--trust-remote-code", help="Let SGLang run the Python files that come with --target."
    ),
    "disable_hybrid_swa_memory": typer.Option(
        "--disable-hybrid-swa-memory/--hybrid-swa-memory",
        help="One KV pool for layers with sliding windows and without, or a pool of their own for the former.",
    ),
    "server_args": typer.Option(
        "--server-arg",
        metavar="NAME=VALUE",
        help="Another argument of SGLang's own, as it calls it; goes to it as it is; may be repeated.",
    ),
}
#: Those that change which code of SGLang runs.
OF_KERNELS = (
    *("dtype", "attention_backend", "cuda_graph", "prefill_cuda_graph", "overlap_schedule"),
    *("enable_overlap_plan_stream", "page_size"),
)

Command = Callable[..., Any]


def allowed_of(name: str) -> str:
    """What an option that is a field of EngineConfig takes, in words."""
    return Place(EngineConfig, (name,)).typed


@functools.cache
def _option(name: str) -> Any:
    """The option; the help of one for a number says which, as a scenario file may have it."""
    kind = list[str] | None if name == "server_args" else get_type_hints(Wanted)[name]
    info = copy.copy(SETTINGS[name])
    if {int, float} & {*get_args(kind)}:
        info.help = f"{info.help} Allowed: {allowed_of(name)}."
    return Annotated[kind, info]


def takes_settings(names: Sequence[str] = tuple(SETTINGS)) -> Callable[[Command], Command]:
    """Decorator: the options of these names stand where the command has a parameter `wanted`."""

    def decorate(command: Command) -> Command:
        added = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=_option(name))
            for name in names
        ]
        own = inspect.signature(command, eval_str=True)
        parameters = [one for each in own.parameters.values() for one in (added if each.name == "wanted" else [each])]

        @functools.wraps(command)
        def call(**given: Any) -> Any:
            typed = {name: given.pop(name) for name in names}
            if "server_args" in typed:
                typed["server_args"] = server_args.read(typed["server_args"] or ())
            return command(**given, wanted=Wanted(**typed))

        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        return call

    return decorate
