"""The engine process: boots an unedited SGLang engine with gate and probe, and passes requests to it.

Engine side: started by path inside SGLang's environment (`python -P engine_host.py SOCKET`); standard library, NumPy,
torch and SGLang only. SGLang spawns its schedulers with this file as their main module, so its top level runs there
before anything of SGLang is imported: that is where hooks are installed.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.machinery
import inspect
import json
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaglecheck_engine.engine_side.mutants.fault_wraps import Faults
    from eaglecheck_engine.engine_side.probes.graph_probe import GraphProbe
    from eaglecheck_engine.engine_side.probes.probe import Probe

_HARNESS = Path(__file__).resolve().parents[2]


def _own_package() -> None:
    """Make our files importable as `eaglecheck_engine.*` without putting anything on SGLang's import path."""
    package = types.ModuleType("eaglecheck_engine")
    package.__path__ = [str(_HARNESS)]
    package.__spec__ = importlib.machinery.ModuleSpec("eaglecheck_engine", None, is_package=True)
    sys.modules["eaglecheck_engine"] = package


_own_package()

from eaglecheck_engine.both_sides import compat, compat_mtp, wire  # noqa: E402
from eaglecheck_engine.engine_side.hooks import ImportHooks  # noqa: E402

_PR_SET_PDEATHSIG = 1
#: Loop steps within which SGLang validates a request and either refuses it or sends it on.
SUBMIT_STEPS = 20
#: Room for a round of a wide model, so that a scheduler need not wait until it is read; the system may give less.
SEND_BYTES = 8 << 20
#: With DP attention SGLang takes the ports from `port` + 233 on: eleven with eight ranks. It names `port` + 10000 too.
SGLANG_PORT_DELTA, PORTS, FIRST_PORT, LAST_PORT = 233, 16, 20000, 50000
ENV_SOCKET = "EAGLECHECK_ENGINE_SOCKET"
ENV_BOOT = "EAGLECHECK_ENGINE_BOOT"
ENV_PARENT = "EAGLECHECK_ENGINE_PARENT"


def _die_with_parent() -> None:
    """Be killed when the parent ends, which each of our processes names to its children, and at once if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[ENV_PARENT]):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[ENV_PARENT] = str(os.getpid())


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    sock.connect(path)
    return sock


def _release(boot: dict[str, Any]) -> compat.Release:
    """The hook table for what is about to boot."""
    release = compat.lookup(boot["release"], overlap=boot["overlap"])
    return compat_mtp.multi_layer(release) if boot["layered"] else release


def _prepare_cpu(hooks: ImportHooks, boot: dict[str, Any]) -> Any:
    """Install the CPU seams of the release; returns the CpuOps (None on a GPU)."""
    if boot["device"] != "cpu":
        return None
    from eaglecheck_engine.engine_side.stand_ins.cpu_ops import CpuOps

    ops = CpuOps(hooks, padded="F-008" in boot["assumed"])
    release = _release(boot)
    seams = release.seams
    if boot["arguments"]["enable_dp_attention"]:
        seams = (*seams, *release.dp_seams, *(release.idle_seams if "F-007" in boot["assumed"] else ()))
    seams = (*seams, *(release.plan_seams if "F-011" in boot["assumed"] else ()))
    if boot["overlap"]:
        seams = (*seams, ("sglang.srt.managers.scheduler", "record_stream", ""))
    ops.install(seams=seams, attention=boot["cpu_attention"])
    return ops


def _prepare_handoff(hooks: ImportHooks, boot: dict[str, Any]) -> None:
    """Our transfer backend, where this engine is one side of a disaggregated pair."""
    if boot.get("handoff"):
        from eaglecheck_engine.engine_side.stand_ins.loopback_classes import register

        folder = boot["handoff"]["folder"]
        hooks.after("sglang.srt.disaggregation.utils", lambda module: register(module, folder=folder))


def _prepare_plugin(hooks: ImportHooks, boot: dict[str, Any]) -> None:
    """A plugin's algorithm, where the scenario asks for one."""
    if boot.get("plugin"):
        from eaglecheck_engine.both_sides import plugin_algorithm

        release = _release(boot)
        hooks.after(
            "sglang.srt.speculative.spec_info",
            lambda module: plugin_algorithm.register(
                module, kind=boot["plugin"], worker=(release.worker_module, release.worker)
            ),
        )


def _in_child() -> None:
    """Runs in every process SGLang spawns: seams now, gate and probe once the scheduler is imported."""
    _die_with_parent()
    boot = json.loads(os.environ[ENV_BOOT])
    hooks = ImportHooks()
    hooks.install()
    ops = _prepare_cpu(hooks, boot)
    _prepare_handoff(hooks, boot)
    _prepare_plugin(hooks, boot)
    hooks.after("sglang.srt.managers.scheduler", lambda module: _arm_scheduler(module, boot, ops))


def _copy_for_children(hooks: ImportHooks, boot: dict[str, Any], ops: Any, own: Sequence[socket.socket]) -> None:
    """SGLang's processes start as copies of this one, which has the seams already; own: what only the host may hold."""
    from eaglecheck_engine.engine_side.host import copies

    def in_copy() -> None:
        _die_with_parent()
        for sock in own:
            sock.close()
        hooks.after("sglang.srt.managers.scheduler", lambda module: _arm_scheduler(module, boot, ops))

    copies.install(in_copy)


def _arm_scheduler(module: types.ModuleType, boot: dict[str, Any], ops: Any) -> None:
    """Wrap the constructor so that hooks go in after SGLang's own source patches (its revert switch).

    What must see CUDA graphs being captured goes in before the models are loaded, which is inside the constructor but
    after those patches.
    """
    from eaglecheck_engine.engine_side.hooks import Ledger

    graphs: list[GraphProbe] = []

    def construct(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            given = inspect.signature(original).bind(self, *args, **kwargs).arguments
            _install_in(self, module, boot, ops, graphs[0] if graphs else None, ranks=_ranks(given))

        return __init__

    def load(original: Any) -> Any:
        def init_model_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
            graphs.append(_watch_captures(boot))
            return original(self, *args, **kwargs)

        return init_model_worker

    Ledger().wrap(module, "Scheduler.__init__", construct)
    if boot["probe"] == "full" and not boot["arguments"]["disable_cuda_graph"]:
        Ledger().wrap(module, "Scheduler.init_model_worker", load)


def _ranks(given: dict[str, Any]) -> tuple[int, int]:
    """(dp_rank, tp_rank) of this process: arguments of the constructor, in newer releases a context of its own."""
    if "tp_rank" in given:
        return given.get("dp_rank") or 0, given["tp_rank"]
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_dp_rank or 0, parallel.tp_rank


def _watch_captures(boot: dict[str, Any]) -> GraphProbe:
    from eaglecheck_engine.engine_side.probes.graph_probe import GraphProbe
    from eaglecheck_engine.engine_side.probes.probe import CHAIN_CHOOSER

    release = compat.lookup(boot["release"], overlap=boot["overlap"])
    worker = importlib.import_module(release.worker_module)
    importlib.import_module("sglang.srt.model_executor.model_runner")
    probe = GraphProbe()
    if boot.get("mutants_in_graphs"):
        from eaglecheck_engine.engine_side.mutants.fault_graphs import Captured

        probe.mutants = Captured()
    probe.install(chooser_module=worker, choosers=("select_top_k_tokens", CHAIN_CHOOSER))
    return probe


def _install_in(
    scheduler: Any,
    module: types.ModuleType,
    boot: dict[str, Any],
    ops: Any,
    graphs: GraphProbe | None,
    *,
    ranks: tuple[int, int],
) -> None:
    import sglang
    import torch
    from eaglecheck_engine.engine_side.host.gate import Gate, pool_level
    from eaglecheck_engine.engine_side.host.lookout import Lookout
    from eaglecheck_engine.engine_side.probes.dock import Dock
    from eaglecheck_engine.engine_side.probes.dp_probe import DpProbe
    from eaglecheck_engine.engine_side.probes.handoff_probe import HandoffProbe, widths
    from eaglecheck_engine.engine_side.probes.probe import Probe
    from eaglecheck_engine.engine_side.probes.recorder import Recorder

    release = _release(boot)
    recorder = Recorder(Dock() if boot["device"] == "cuda" and boot["probe"] != "off" else None)
    probe = Probe(recorder, release, graphs)
    sock = _connect(os.environ[ENV_SOCKET])
    gate = Gate(sock, recorder)
    gate.scheduler = scheduler
    owner = sys.modules[release.gate[0]]
    probe.ledger.wrap(owner, release.gate[1], gate.wrap)
    for name in [name for name in dir(module.Scheduler) if name.startswith("event_loop")]:
        probe.ledger.wrap(module, f"Scheduler.{name}", gate.watch_loop)
    if boot["arguments"]["tp_size"] > 1:
        Lookout(_connect(os.environ[ENV_SOCKET]), recorder, ranks=ranks).start()
    if boot["probe"] == "tokens":
        probe.install_rounds()
    elif boot["probe"] == "full":
        probe.install()
        if boot["arguments"]["enable_dp_attention"]:
            DpProbe(probe).install()
        if boot.get("handoff"):
            HandoffProbe(probe, scheduler).install()
        gate.make_faults = lambda: _make_faults(probe, scheduler)
    wire.send(
        sock,
        {
            "op": "hello",
            "role": "scheduler",
            "pid": os.getpid(),
            "dp_rank": ranks[0],
            "tp_rank": ranks[1],
            "release": sglang.__version__,
            **_tree(sglang),
            "torch": torch.__version__,
            "worker": type(scheduler.model_worker).__name__,
            "worker_generation": release.generation,
            "overlap": bool(getattr(scheduler, "enable_overlap", boot["overlap"])),
            "device": boot["device"],
            "card": torch.cuda.get_device_name() if boot["device"] == "cuda" else "",
            "probe": boot["probe"],
            "graphs": {} if graphs is None else graphs.sizes(),
            "backend": boot["arguments"]["attention_backend"],
            "dtype": boot["arguments"]["dtype"],
            "revert": boot["revert"],
            "flags": boot["flags"],
            "truncates_at_finish": release.truncates_at_finish,
            "hooks_found": probe.ledger.found,
            "hooks_missing": probe.ledger.missing,
            "replaced": ops.describe() if ops is not None else [],
            "pool": pool_level(scheduler),
            **({"side": boot["handoff"]["side"], **widths(scheduler)} if boot.get("handoff") else {}),
        },
    )


def _tree(package: types.ModuleType) -> dict[str, str]:
    """The folder a commit's SGLang was imported from; nothing for a release."""
    boot = json.loads(os.environ[ENV_BOOT])
    return {} if boot.get("tree") is None else {"tree": str(Path(str(package.__file__)).resolve().parents[1])}


def _check_version(package: types.ModuleType, boot: dict[str, Any]) -> None:
    """A commit is known by where its files lie, since it need not know its version; a release by its version."""
    if boot.get("tree") is not None:
        found = Path(str(package.__file__)).resolve()
        if not found.is_relative_to(Path(boot["tree"]).resolve()):
            raise RuntimeError(f"asked for the SGLang in {boot['tree']}, imported {found}")
    elif package.__version__ != boot["release"]:
        raise RuntimeError(f"asked for SGLang {boot['release']}, this environment holds {package.__version__}")


def _make_faults(probe: Probe, scheduler: Any) -> Faults:
    from eaglecheck_engine.engine_side.mutants.fault_wraps import Faults

    return Faults(probe, scheduler)


def _watch(lifeline: socket.socket) -> None:
    """End the whole process group when the control side goes away, even while the engine boots or hangs."""
    wire.send(lifeline, {"op": "hello", "role": "lifeline", "pid": os.getpid()})
    try:
        wire.receive(lifeline)
    except (wire.WireClosed, OSError):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _take_lease(sock: socket.socket, boot: dict[str, Any]) -> list[Any]:
    """Hold a share of one GPU a rank for as long as this process lives, and see no other card; [] where none is asked.

    Returns the leases in the order of their cards.
    """
    if boot.get("lease") is None:
        return []
    from eaglecheck_engine.both_sides import leases

    def say(text: str) -> None:
        print(text, flush=True)  # into the engine's log, where a test session can be watched
        wire.send(sock, {"op": "waiting", "text": text})

    try:
        held = leases.take_each(leases.Request(**boot["lease"]), count=boot["arguments"].get("tp_size", 1), say=say)
    except leases.CardError as error:
        wire.send(sock, {"op": "no_lease", "error": str(error)})
        wire.receive(sock)  # ended from the other side, once it has read this
        raise
    os.environ[leases.VISIBLE] = ",".join(lease.card.uuid for lease in held)
    others = [lease.plain() for lease in held[1:]]
    wire.send(sock, {"op": "leased", "lease": held[0].plain() | ({"others": others} if others else {})})
    return held


def _free_ports(number: int) -> int:
    """A port for SGLang to count from: of several ranks it takes fixed ones behind it, and engines run side by side.

    number: different for engines that look at the same time; each begins at a place of its own.
    """
    blocks = (LAST_PORT - FIRST_PORT) // PORTS
    for turn in range(blocks):
        first = FIRST_PORT + PORTS * ((number + turn) % blocks)
        if all(_is_free(port) for port in range(first, first + PORTS)):
            return first - SGLANG_PORT_DELTA
    raise RuntimeError(f"no {PORTS} ports in a row are free between {FIRST_PORT} and {LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _engine_arguments(boot: dict[str, Any]) -> dict[str, Any]:
    """The boot record as `sglang.Engine` keywords, less those this release does not know."""
    from sglang.srt.server_args import ServerArgs

    known: set[str] = set()
    for base in ServerArgs.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    arguments = dict(boot["arguments"])
    if arguments.get("enable_dp_attention"):
        arguments["port"] = _free_ports(os.getpid())
    elif (
        "nccl_port" in known
    ):  # SGLang looks for a free one itself, and of many engines that start at once two may find it
        arguments["nccl_port"] = _free_ports(os.getpid()) + SGLANG_PORT_DELTA
    optional = {name: value for name, value in boot["optional_arguments"].items() if name in known}
    return {**arguments, **optional}


def _gpu_used(held: list[Any]) -> int | None:
    """MiB this engine has on its cards now that it is up; None without a lease, or where the driver does not say."""
    from eaglecheck_engine.both_sides import leases

    try:
        used = [leases.used_mib(lease, os.getpid()) for lease in held]
    except leases.CardError:  # the engine is up all the same
        return None
    known = [size for size in used if size is not None]
    return sum(known) if known and len(known) == len(used) else None


async def _serve(engine: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass requests to the engine; answer each with its outputs when it is asked for."""
    tasks: dict[str, asyncio.Task[Any]] = {}
    while True:
        length = int.from_bytes(await reader.readexactly(4), "big")
        command = json.loads(await reader.readexactly(length))
        if command["op"] == "submit":
            tasks[command["rid"]] = task = asyncio.create_task(_generate(engine, command))
            for _ in range(SUBMIT_STEPS):
                await asyncio.sleep(0)
            # A request that SGLang refuses is over before it reaches any scheduler: nobody must wait for it there.
            answer: dict[str, Any] = {"op": "submitted", "refused": task.done()}
        elif command["op"] == "abort":
            engine.tokenizer_manager.abort_request(rid=command["rid"])
            answer = {"op": "aborting"}
        elif command["op"] in ("pause", "resume"):
            await _pause_or_resume(engine, command)
            answer = {"op": f"{command['op']}d"}
        elif command["op"] == "collect":
            ends = await asyncio.gather(*(tasks.pop(rid) for rid in command["rids"]))
            answer = {"op": "collected", "ends": ends}
        else:
            answer = {"op": "error", "what": f"unknown command {command['op']!r}"}
        writer.write(wire.encode(answer))
        await writer.drain()


async def _pause_or_resume(engine: Any, command: dict[str, Any]) -> None:
    from sglang.srt.managers import io_struct

    if command["op"] == "pause":
        await engine.tokenizer_manager.pause_generation(io_struct.PauseGenerationReqInput(mode=command["mode"]))
    else:
        await engine.tokenizer_manager.continue_generation(io_struct.ContinueGenerationReqInput())


async def _generate(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    try:
        result = await engine.async_generate(
            input_ids=command["prompt"],
            sampling_params=command["sampling"],
            rid=command["rid"],
            priority=command["priority"],
            **({} if command["dp_rank"] is None else {"routed_dp_rank": command["dp_rank"]}),
            **_meeting_point(command),
        )
    except Exception as error:  # an aborted or refused request is a result
        return {"rid": command["rid"], "reason": "error", "error": str(error), "output_ids": [], "cached_tokens": 0}
    meta = result["meta_info"]
    reason = meta.get("finish_reason") or {}
    return {
        "rid": command["rid"],
        "reason": reason.get("type", "unknown"),
        "output_ids": list(result["output_ids"]),
        "cached_tokens": int(meta.get("cached_tokens", 0)),
    }


def _meeting_point(command: dict[str, Any]) -> dict[str, Any]:
    """Where the two sides of a hand-over find each other; nothing is ever connected to."""
    if command.get("room") is None:
        return {}
    host = "127.0.0.1"
    if command.get("fake"):
        host = importlib.import_module("sglang.srt.disaggregation.utils").FAKE_BOOTSTRAP_HOST
    return {"bootstrap_host": host, "bootstrap_port": 1, "bootstrap_room": command["room"]}


def main() -> None:
    path = sys.argv[1]
    sock = _connect(path)
    wire.send(sock, {"op": "hello", "role": "host", "pid": os.getpid()})
    lifeline = _connect(path)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    boot, _ = wire.receive(sock)
    held = _take_lease(sock, boot)  # its locks are this process's own: they end with it, however it ends
    os.environ.update(boot["environment"])
    os.environ[ENV_SOCKET] = path
    os.environ[ENV_BOOT] = json.dumps(boot)
    os.environ[ENV_PARENT] = str(os.getpid())
    hooks = ImportHooks()
    hooks.install()
    ops = _prepare_cpu(hooks, boot)
    _prepare_handoff(hooks, boot)
    _prepare_plugin(hooks, boot)
    try:
        import sglang

        _check_version(sglang, boot)
        if boot.get("copies"):
            _copy_for_children(hooks, boot, ops, (sock, lifeline))
        engine = sglang.Engine(**_engine_arguments(boot))
    except BaseException as error:
        wire.send(sock, {"op": "boot_failed", "error": f"{type(error).__name__}: {error}"})
        raise
    wire.send(sock, {"op": "booted", "gpu_used_mib": _gpu_used(held)})
    loop = getattr(engine, "loop", None) or asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def run() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        await _serve(engine, reader, writer)

    try:
        loop.run_until_complete(run())
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        pass  # the control side closed: the normal end
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _in_child()
