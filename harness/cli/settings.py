"""SGLang's own settings as options: commands that take them get one `Wanted` of what was typed."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

from harness.cli import options
from harness.contract.allowed import Place
from harness.contract.scenario import EngineConfig
from harness.driving.adapt import Wanted
from harness.engines import server_args

#: A command's parameter -> the field of `Wanted`, and the option.
SETTINGS: dict[str, tuple[str, Any]] = {
    "dtype": ("dtype", options.Dtype),
    "backend": ("attention_backend", options.Backend),
    "graphs": ("cuda_graph", options.Graphs),
    "prefill_graphs": ("prefill_cuda_graph", options.PrefillGraphs),
    "overlap": ("overlap_schedule", options.Overlap),
    "page": ("page_size", options.Page),
    "context_length": ("context_length", options.Context),
    "chunked_prefill_size": ("chunked_prefill_size", options.Chunk),
    "max_running_requests": ("max_running_requests", options.Running),
    "max_total_tokens": ("max_total_tokens", options.Pool),
    "cuda_graph_max_bs": ("cuda_graph_max_bs", options.GraphBatch),
    "mem_fraction_static": ("mem_fraction_static", options.MemFraction),
    "trust_remote_code": ("trust_remote_code", options.TrustCode),
    "disable_hybrid_swa_memory": ("disable_hybrid_swa_memory", options.OnePool),
    "server_arg": ("server_args", options.ServerArg),
}
#: Those that change which code of SGLang runs.
OF_KERNELS = ("dtype", "backend", "graphs", "prefill_graphs", "overlap", "page")

Command = Callable[..., Any]


@functools.cache
def _option(name: str) -> Any:
    """The option; the help of one for a number says which, as a scenario file may have it."""
    field, option = SETTINGS[name]
    kind, info = get_args(option)
    if {int, float}.isdisjoint(get_args(kind)):
        return option
    info = copy.copy(info)
    info.help = f"{info.help} Allowed: {Place(EngineConfig, (field,)).words.removesuffix(' or null')}."
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
            typed = {SETTINGS[name][0]: given.pop(name) for name in names}
            if "server_args" in typed:
                typed["server_args"] = server_args.read(typed["server_args"] or ())
            return command(**given, wanted=Wanted(**typed))

        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        return call

    return decorate
