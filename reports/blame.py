"""Where in SGLang: the call that made the value first seen wrong, the call that read it, and the flags of the server.

By the hook table of the release and, where that release is installed, its source. It must not judge, and must not
import sglang: sources are read, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from harness.both_sides import compat
from harness.contract.scenario import Scenario
from harness.contract.types import Divergence, Kind, Phase
from harness.engines import envs
from harness.engines.launch import build_launch

RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
BATCH = "sglang.srt.managers.schedule_batch"
_ATTENTION = "sglang.srt.layers.attention"
#: Backend -> its module, the class that plans the draft's steps, and the one that runs.
BACKENDS = {
    "triton": ("triton_backend", "TritonMultiStepDraftBackend", "TritonAttnBackend"),
    "flashinfer": ("flashinfer_backend", "FlashInferMultiStepDraftBackend", "FlashInferAttnBackend"),
    "fa3": ("flashattention_backend", "FlashAttentionMultiStepBackend", "FlashAttentionBackend"),
}
#: Checks of which slots attention reads, as the backend plans it.
PLANNED = ("reads", "beams")
#: What is read from the cache, not from the arguments of a forward.
FROM_CACHE = ("hidden_out-", "logits-", "lse-", "scores-")
#: Arguments that say where and not how.
NOT_FLAGS = ("model_path", "speculative_draft_model_path", "random_seed", "log_level", "mem_fraction_static")


def where(found: Divergence, scenario: Scenario, release: str) -> tuple[str, str]:
    """(who made the value, who read it), by file, line and function of the release.

    Empty for what says itself where it is, or belongs to no row; or of a release that has no hook table.
    """
    if found.kind in (Kind.CRASH, Kind.HANG, Kind.LEAK, Kind.LOCKSTEP) or not found.key.rid or found.check == "cached":
        return "", ""  # who wrote over a cached row, nobody saw
    made, read = (_first(calls, release) for calls in _known_calls(found, scenario, release))
    return made, read if made and read != made else ""


def where_lines(found: Divergence, scenario: Scenario, release: str) -> list[str]:
    """The same in one line; none where nothing is known."""
    made, read = where(found, scenario, release)
    return [f"in SGLang: made by {made}" + (f"; read by {read}" if read else "")] if made else []


def files(found: Divergence, scenario: Scenario, release: str) -> tuple[str, ...]:
    """The files of the calls that made and read the value, as sglang/srt/…; none where no call is known."""
    calls = [call for sort in _known_calls(found, scenario, release) for call in sort]
    return tuple(dict.fromkeys(f"sglang/{_file(call.partition(':')[0])}" for call in calls))


def _known_calls(found: Divergence, scenario: Scenario, release: str) -> tuple[Sequence[str], Sequence[str]]:
    try:
        return _calls(found, scenario, release)
    except (LookupError, ValueError):
        return (), ()


def server_flags(scenario: Scenario, release: str, device: str) -> str:
    """The server flags of the engine that ran a scenario; empty where it is not known."""
    env = envs.EngineEnv(version=release, python=Path("python"), pythonpath=(), torch="", ready=True)
    try:
        launch = build_launch(
            env=env, spec=scenario.spec, engine=scenario.engine, target=Path("t"), draft=Path("d"), device=device
        )
    except (LookupError, ValueError):
        return ""
    return " ".join(flags(as_served(launch.boot["arguments"], scenario)))


def as_served(arguments: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """The arguments of a server that is what the gate makes of the engine for one scenario."""
    engine = scenario.engine
    own: dict[str, Any] = {"chunked_prefill_size": engine.chunked_prefill_size or -1}
    if engine.running_limit is not None:
        own["max_running_requests"] = engine.running_limit
    return {**arguments, **own}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """As they are typed for `sglang.launch_server`, those that are set."""
    named = {key: value for key, value in arguments.items() if key not in NOT_FLAGS}
    return [
        f"--{key.replace('_', '-')}{'' if value is True else f' {value}'}"
        for key, value in named.items()
        if value not in (None, False, "")
    ]


def made_by(found: Divergence, scenario: Scenario, release: str) -> str:
    """The call that made the value, for a file that stands alone."""
    return _first(_calls(found, scenario, release)[0], release)


def _calls(found: Divergence, scenario: Scenario, release: str) -> tuple[Sequence[str], Sequence[str]]:
    """(what may have made the value, what read it) as module:function, the likeliest name first."""
    spec, engine = scenario.spec, scenario.engine
    overlap = engine.overlap_schedule
    if overlap is None:
        overlap = compat.default_overlap(release, topk=spec.eagle_topk, device="cpu")
    row = compat.lookup(release, overlap=overlap)
    row = compat.multi_layer(row) if spec.algorithm == "MTP" else row
    draft = f"{row.worker_module}:{row.draft}"
    module, plan, attention = BACKENDS.get(engine.attention_backend, ("", "", ""))
    planned = found.check in PLANNED
    cached = planned or (found.kind is Kind.NUMERIC and found.hint.startswith(FROM_CACHE))
    run = f"{_ATTENTION}.{module}:{attention}"
    if found.check == "finish":
        return [f"{BATCH}:Req.update_finish_state", f"{BATCH}:Req.check_finished"], []
    if found.key.phase == Phase.DRAFT and cached:
        return [f"{_ATTENTION}.{module}:{plan}.init_forward_metadata"], [f"{run}.forward_decode"]
    if planned or (found.key.phase == Phase.VERIFY and cached):
        return [f"{run}.init_forward_metadata"], [f"{run}.forward_extend"]
    return {
        Phase.PREFILL: ([f"{BATCH}:ScheduleBatch.prepare_for_extend"], [RUNNER]),
        Phase.DRAFT_PREFILL: ([f"{draft}.{row.draft_prefill}"], [RUNNER]),
        Phase.DRAFT: ([f"{draft}.draft_forward"], [RUNNER]),
        Phase.VERIFY: (
            ["sglang.srt.speculative.eagle_utils:build_tree_kernel_efficient"],
            [f"{row.worker_module}:{row.worker}.verify"],
        ),
        Phase.ACCEPT: ([":".join(row.sample)] if row.sample else [], [f"{row.worker_module}:{row.worker}.verify"]),
        Phase.EXTEND: ([f"{draft}.{row.draft_extend}"], [RUNNER]),
        Phase.PREBUILT: (
            ["sglang.srt.disaggregation.decode_schedule_batch_mixin:"
             "ScheduleBatchDisaggregationDecodeMixin.process_prebuilt"],
            [f"{draft}.draft_forward"],
        ),
    }.get(Phase(found.key.phase), ([], []))  # fmt: skip


def _first(calls: Sequence[str], release: str) -> str:
    """The first that the release's source has, with its line; the first of all where there is no source."""
    for call in calls:
        module, _, function = call.partition(":")
        if place := _functions(module, release).get(function):
            return f"{place} {function}"
    return f"{_file(calls[0].partition(':')[0])} {calls[0].partition(':')[2]}" if calls else ""


def _file(module: str) -> str:
    return f"{module.removeprefix('sglang.').replace('.', '/')}.py"


def _functions(module: str, release: str) -> Mapping[str, str]:
    """Qualified name -> file and line, of one module of an installed release and what it imports; empty without it."""
    own, imported = _parsed(module, release)
    there = {name: _parsed(other, release)[0].get(name) for name, other in imported.items() if name not in own}
    return {**own, **{name: place for name, place in there.items() if place}}


@cache
def _parsed(module: str, release: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """(function -> file and line, imported name -> its module of SGLang) of a module; empty without its source."""
    here = envs.current()
    env = here if here is not None and here.version == release else envs.state(release)
    for root in env.pythonpath:
        path = root / f"{module.replace('.', '/')}.py"
        if path.is_file():
            body = ast.parse(path.read_text(encoding="utf-8")).body
            own = {name: f"{_file(module)}:{line}" for name, line in _named(body, "")}
            imports = [node for node in body if isinstance(node, ast.ImportFrom) and not node.level]
            return own, {each.name: str(node.module) for node in imports for each in node.names}
    return {}, {}


def _named(body: Sequence[ast.stmt], within: str) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{within}{node.name}", node.lineno
        elif isinstance(node, ast.ClassDef):
            yield from _named(node.body, f"{within}{node.name}.")
