"""Applies engine options of a command line to scenarios; `refusals` says what no engine can run.

An option changes the scenario, so that what is stored says what ran. It must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from harness.contract.allowed import Place
from harness.contract.scenario import Scenario, numbered
from harness.contract.settings import EngineConfig
from harness.contract.usage import UsageError, unknown
from harness.engines.launch import BACKENDS, DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the options of SGLang's own names ask for (--dtype, --page-size, --context-length, …), or None."""

    dtype: str | None = None
    attention_backend: str | None = None
    cuda_graph: bool | None = None
    prefill_cuda_graph: bool | None = None
    overlap_schedule: bool | None = None
    enable_overlap_plan_stream: bool | None = None
    page_size: int | None = None
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    cuda_graph_max_bs: int | None = None
    mem_fraction_static: float | None = None
    trust_remote_code: bool | None = None
    disable_hybrid_swa_memory: bool | None = None
    server_args: dict[str, Any] | None = None

    def changes(self) -> dict[str, Any]:
        """Those that were named, as fields of EngineConfig."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NOTHING = Wanted()


def adapted(scenarios: Iterable[Scenario], wanted: Wanted, *, device: str) -> list[Scenario]:
    """The scenarios with what is wanted, in order; UsageError for a value that the device does not have."""
    _check_values(wanted, device)
    changes = wanted.changes()
    if not changes:
        return list(scenarios)
    found = [_adapted(scenario, changes) for scenario in scenarios]
    if wanted.cuda_graph_max_bs is not None and not any(scenario.engine.cuda_graph for scenario in found):
        raise UsageError(
            f"--cuda-graph-max-bs {wanted.cuda_graph_max_bs}: no scenario runs in CUDA graphs\n"
            "  add  --device cuda --cuda-graph, or leave it out"
        )
    if wanted.prefill_cuda_graph and not all(scenario.engine.cuda_graph for scenario in found):
        raise UsageError("--prefill-cuda-graph: prompts run in CUDA graphs beside decodes only\n  add  --cuda-graph")
    return found


def _adapted(scenario: Scenario, changes: dict[str, Any]) -> Scenario:
    before = scenario.engine.model_dump()
    # arguments that a scenario has and the command line does not name stay
    server_args = before["server_args"] | changes.get("server_args", {})
    try:
        engine = EngineConfig(**{**before, **changes, "server_args": server_args})
    except ValidationError as error:
        raise UsageError(refused_setting(error)) from error
    return scenario.model_copy(update={"engine": engine, "requests": numbered(scenario.requests, engine)})


def refused_setting(error: ValidationError) -> str:
    """What a message says of the first engine setting that cannot be."""
    first = error.errors()[0]
    option = "--" + str(first["loc"][0]).replace("_", "-")
    ours = first["type"] == "value_error"
    allowed = first["msg"].removeprefix("Value error, ") if ours else Place(EngineConfig, first["loc"]).typed
    return f"{option} {first['input']} cannot be\n  allowed: {allowed}"


def _check_values(wanted: Wanted, device: str) -> None:
    for option, value, allowed in (
        ("dtype", wanted.dtype, DTYPES),
        ("attention-backend", wanted.attention_backend, BACKENDS),
    ):
        if value is not None and value not in allowed[device]:
            raise UsageError(unknown(f"--{option} on {device}:", value, allowed[device]))
    if wanted.cuda_graph and device == "cpu":
        raise UsageError(
            "--cuda-graph: CUDA graphs need a GPU\n  allowed on cpu: --disable-cuda-graph, or add  --device cuda"
        )
