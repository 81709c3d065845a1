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
from typing import TYPE_CHECKING, Any

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
from . import draft_input_builder, grammars
from .gate import Gate
from .given import facts
from .import_patches import release_of
from .processes import ENV_SOCKET, connect
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..mutants.armed import ArmedMutants

#: What the recorder does, where a clock is to tell one from the other.
OF_RECORDER = ("open_round", "copied", "held", "note", "replayed", "before_replay", "close_round", "take")


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
    grammars.install(probe.hooks, sys.modules["sglang.srt.constrained.grammar_manager"])
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
    wire.send(sock, {**hello, **facts(scheduler, boot, probe), **seen, **asked})


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


def _make_mutants(probe: Probe, scheduler: Any, *, tp_rank: int) -> ArmedMutants:
    from ..mutants.sites import make_mutants

    return make_mutants(probe, scheduler, tp_rank=tp_rank)
