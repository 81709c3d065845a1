"""Gate, probe and mutants, put into a scheduler process once SGLang has built its scheduler.

Engine side. It is imported right after SGLang's scheduler module, and so after torch.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...both_sides import compat, wire
from ..clock import Clock
from ..hooks import HookRegistry, Original, around
from ..probes.distributed_probe import DpProbe, HandoffProbe, widths
from ..probes.graph_probe import GraphProbe
from ..probes.host_probe import HostProbe
from ..probes.names import CHAIN_CHOOSER
from ..probes.probe import Probe
from ..probes.recorder import Recorder
from ..probes.staging import StagingBuffer
from . import draft_input_builder
from .gate import Gate
from .given import given, models
from .import_patches import release_of
from .processes import ENV_SOCKET, connect
from .scheduler_state import pool_level
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..mutants.armed import ArmedMutants

#: What the recorder does, where a clock is to tell one from the other.
OF_RECORDER = ("open_round", "copied", "held", "note", "replayed", "before_replay", "close_round", "take")
#: Arguments that say where something is, or that each scenario sets anew.
NAMED = {"model_path", "speculative_draft_model_path", "log_level", "chunked_prefill_size"}


def hook_scheduler(module: types.ModuleType, boot: dict[str, Any], ops: Any) -> None:
    """Wrap the constructor so that hooks go in after SGLang's own source patches (its revert switch).

    What must see CUDA graphs being captured goes in before the models are loaded, which is inside the constructor but
    after those patches.
    """
    graphs: list[GraphProbe] = []
    clock = Clock() if boot.get("clock") else None

    def construct(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        given = inspect.signature(original).bind(scheduler, *args, **kwargs).arguments
        seen = graphs[0] if graphs else None
        _install_in(scheduler, module, boot, ops, seen, ranks=_ranks(given), clock=clock)

    def load(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        graphs.append(_watch_captures(boot, clock))
        return original(scheduler, *args, **kwargs)

    HookRegistry().wrap(module, "Scheduler.__init__", around(construct))
    if boot["probe"] == "full" and not boot["arguments"]["disable_cuda_graph"]:
        HookRegistry().wrap(module, "Scheduler.init_model_worker", around(load))


def _ranks(given: dict[str, Any]) -> tuple[int, int]:
    """(dp_rank, tp_rank) of this process: arguments of the constructor, in newer releases a context of its own."""
    if "tp_rank" in given:
        return given.get("dp_rank") or 0, given["tp_rank"]
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_dp_rank or 0, parallel.tp_rank


def _watch_captures(boot: dict[str, Any], clock: Clock | None) -> GraphProbe:
    release = compat.lookup(boot["release"], overlap=boot["overlap"])
    worker = importlib.import_module(release.worker_module)
    importlib.import_module("sglang.srt.model_executor.model_runner")
    probe = GraphProbe(device=boot["device"])
    probe.hooks.clock = clock
    if boot["arguments"].get("enable_torch_compile"):
        keep_from_compiling(probe)
    if boot.get("mutants_in_graphs"):
        from ..mutants.graphs import GraphMutants

        probe.mutants = GraphMutants()
    probe.install(chooser_module=worker, choosers=("select_top_k_tokens", CHAIN_CHOOSER), drafter=release.draft)
    return probe


def _compiled(boot: dict[str, Any], graphs: GraphProbe | None) -> dict[str, bool]:
    """What became of torch.compile, where it was asked for: SGLang goes without it where a model does not let it."""
    asked = boot["arguments"].get("enable_torch_compile") and boot["probe"] == "full"
    return {"enable_torch_compile": graphs is not None and bool(graphs.compiled)} if asked else {}


def keep_from_compiling(probe: GraphProbe) -> None:
    """Our wrappers run as they are around what torch.compile makes of a model; it would compile them with it."""
    from torch._dynamo import trace_rules

    trace_rules.add(type(probe).__module__.rpartition(".")[0])
    probe.compiled = False


def _install_in(
    scheduler: Any,
    module: types.ModuleType,
    boot: dict[str, Any],
    ops: Any,
    graphs: GraphProbe | None,
    *,
    ranks: tuple[int, int],
    clock: Clock | None,
) -> None:
    """Hold the loop, watch it, and say hello to the control side with what there is to know of this process."""
    release, side = release_of(boot), (boot.get("handoff") or {}).get("side", "")
    asked = {"component": draft_input_builder.answers(scheduler)} if side == "decode" else {}  # of SGLang as it is
    recorder = Recorder(StagingBuffer() if boot["device"] == "cuda" and boot["probe"] != "off" else None)
    if clock is not None:
        clock.watch(recorder, *OF_RECORDER)
    adaptive = bool(boot["arguments"].get("speculative_adaptive"))
    probe = Probe(recorder, release, graphs, adaptive=adaptive, receives=side == "decode")
    probe.hooks.clock = clock
    sock = connect(os.environ[ENV_SOCKET])
    gate = Gate(sock, recorder, scheduler, clock)
    probe.hooks.wrap(sys.modules[release.gate[0]], release.gate[1], gate.wrap)
    gate.retraction.install(probe.hooks, module, sys.modules["sglang.srt.managers.schedule_batch"])
    for name in [name for name in dir(module.Scheduler) if name.startswith("event_loop")]:
        probe.hooks.wrap(module, f"Scheduler.{name}", around(gate.watch_loop))
    if boot["arguments"]["tp_size"] > 1:
        Watchdog(connect(os.environ[ENV_SOCKET]), recorder, ranks=ranks).start()
    if boot["probe"] == "full":
        _see(probe, gate, scheduler, ranked=boot["arguments"]["enable_dp_attention"], paired=bool(side))
        gate.make_mutants = partial(_make_mutants, probe, scheduler, tp_rank=ranks[1])
    hello = {"op": "hello", "role": "scheduler", "pid": os.getpid(), "dp_rank": ranks[0], "tp_rank": ranks[1]}
    seen = {
        "replaced": ops.describe() if ops is not None else [],
        **({"side": side, **widths(scheduler)} if side else {}),
    }
    wire.send(
        sock, {**hello, **_versions(boot), **_engine(scheduler, boot, graphs), **_seen(probe, boot), **seen, **asked}
    )


def _see(probe: Probe, gate: Gate, scheduler: Any, *, ranked: bool, paired: bool) -> None:
    """Record what such an engine does; paired: it is one side of a hand-over."""
    probe.install()
    if ranked:
        DpProbe(probe).install()
    if paired:
        HandoffProbe(probe, scheduler).install()
    if controller := getattr(scheduler.tree_cache, "cache_controller", None):
        gate.host = HostProbe(probe.recorder, controller, scheduler.tree_cache, probe.forwards.attention.rows)
        gate.host.install(probe.hooks)


def _engine(scheduler: Any, boot: dict[str, Any], graphs: GraphProbe | None) -> dict[str, Any]:
    """What was asked of SGLang, and what it runs with."""
    wanted = boot["optional_arguments"] | boot["arguments"] | boot.get("variables", {})
    return {
        "worker": type(scheduler.model_worker).__name__,
        "overlap": bool(getattr(scheduler, "enable_overlap", boot["overlap"])),
        "graphs": {} if graphs is None else graphs.sizes(),
        "backend": boot["arguments"]["attention_backend"],
        "dtype": boot["arguments"]["dtype"],
        "asked": {name: value for name, value in wanted.items() if name not in NAMED},
        "given": given(scheduler, set(wanted) - NAMED) | _compiled(boot, graphs),
        "models": models(scheduler),
        "eos_token_ids": _eos(scheduler, boot.get("eos_token_ids")),
        "pool": pool_level(scheduler),
        **{name: boot[name] for name in ("revert", "flags", "probe")},
        **{name: boot[name] for name in ("slimmed", "changed_files", "server_args") if boot.get(name)},
    }


def _seen(probe: Probe, boot: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of it, and how."""
    release, staging = release_of(boot), probe.recorder.staging
    return {
        "worker_generation": release.generation,
        "truncates_at_finish": release.truncates_at_finish,
        "hooks_found": probe.hooks.found,
        "hooks_missing": probe.hooks.missing,
        **({} if staging is None else {"copies": staging.batches}),
    }


def _eos(scheduler: Any, named: list[int] | None) -> list[int]:
    """The tokens that end a request: those the checkpoint names, else SGLang's; none of a pair of ours (None)."""
    if named is None:
        return []
    known = sorted(getattr(scheduler.model_config, "hf_eos_token_id", None) or ())
    return named or [one for one in known if one < scheduler.model_config.vocab_size]


def _versions(boot: dict[str, Any]) -> dict[str, Any]:
    """Of SGLang, torch and the card; tree: the folder that a commit's SGLang was imported from."""
    import sglang

    tree = {} if boot.get("tree") is None else {"tree": str(Path(str(sglang.__file__)).resolve().parents[1])}
    card = torch.cuda.get_device_name() if boot["device"] == "cuda" else ""
    return {"release": sglang.__version__, **tree, "torch": torch.__version__, "device": boot["device"], "card": card}


def _make_mutants(probe: Probe, scheduler: Any, *, tp_rank: int) -> ArmedMutants:
    from ..mutants.sites import make_mutants

    return make_mutants(probe, scheduler, tp_rank=tp_rank)
