"""The engine process: boots an unedited SGLang engine with gate and probe, and passes requests to it.

Engine side: started by path inside SGLang's environment (`python -P engine_host.py SOCKET`); standard library, NumPy,
torch and SGLang only. Where SGLang spawns its schedulers, this file is their main module, so its top level runs there
before anything of SGLang is imported: that is where hooks are installed. Where they are forked, `_fork_children` does.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import json
import os
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HARNESS = Path(__file__).resolve().parents[2]
#: Said instead of a socket's path: to be forked by those who ask for it over this open socket.
FORK_SERVER = "fork-server"


def _own_package() -> None:
    """Make our files importable as `eaglecheck_engine.*` without putting anything on SGLang's import path."""
    package = types.ModuleType("eaglecheck_engine")
    package.__path__ = [str(_HARNESS)]
    package.__spec__ = importlib.machinery.ModuleSpec("eaglecheck_engine", None, is_package=True)
    sys.modules["eaglecheck_engine"] = package


_own_package()

from eaglecheck_engine.both_sides import wire  # noqa: E402
from eaglecheck_engine.engine_side.hooks import ImportHooks  # noqa: E402
from eaglecheck_engine.engine_side.host.beside import installed_packages  # noqa: E402
from eaglecheck_engine.engine_side.host.import_patches import install_patches, leave_out_models  # noqa: E402
from eaglecheck_engine.engine_side.host.processes import (  # noqa: E402
    ENV_BOOT,
    ENV_PARENT,
    ENV_SOCKET,
    connect,
    die_with_parent,
    uncollected,
    uncollected_until_run,
)


def _in_child() -> None:
    """Runs in every process SGLang spawns: patches now, gate and probe once the scheduler is imported."""
    die_with_parent()
    uncollected_until_run()
    boot = json.loads(os.environ[ENV_BOOT])
    hooks, ops = install_patches(boot)
    _hook_scheduler(hooks, ops, boot)


def _hook_scheduler(hooks: ImportHooks, ops: Any, boot: dict[str, Any]) -> None:
    if boot.get("mutable") or boot.get("mutated") or boot.get("executed") or "kv_canary" in boot["optional_arguments"]:
        from eaglecheck_engine.engine_side.host import source_swap  # needs torch

        source_swap.install(boot, hooks)

    def hook(module: types.ModuleType) -> None:
        from eaglecheck_engine.engine_side.host.scheduler_hooks import hook_scheduler  # needs torch

        hook_scheduler(module, boot, ops)

    hooks.after("sglang.srt.managers.scheduler", hook)


def _fork_children(ready: Prepared, boot: dict[str, Any], own: Sequence[socket.socket]) -> None:
    """SGLang's processes are forked from this one, which has the patches already; own: what only the host may hold."""
    from eaglecheck_engine.engine_side.host import fork_server

    def in_child() -> None:
        die_with_parent()
        for sock in own:
            sock.close()
        if ready.cuda is not None:
            ready.cuda.restore()
        _hook_scheduler(ready.hooks, ready.ops, boot)

    def refused() -> str:
        why = ready.why()
        if why and (flag := f"SGLang's own processes were started anew: {why}") not in boot["flags"]:
            boot["flags"].append(flag)  # for the trace's header
            os.environ[ENV_BOOT] = json.dumps(boot)
        return why

    fork_server.fork_children(in_child, waits=boot["arguments"]["skip_tokenizer_init"], refused=refused)


def _check_version(package: types.ModuleType, boot: dict[str, Any]) -> None:
    """A commit is known by where its files lie, since it need not know its version; a release by its version."""
    if boot.get("tree") is not None:
        found = Path(str(package.__file__)).resolve()
        if not found.is_relative_to(Path(boot["tree"]).resolve()):
            raise RuntimeError(f"asked for the SGLang in {boot['tree']}, imported {found}")
    elif package.__version__ != boot["release"]:
        raise RuntimeError(
            f"asked for SGLang {boot['release']}, this environment holds {package.__version__}; a checkout that was "
            "moved since it was installed is installed again:  pip install -e python"
        )


def _watch(lifeline: socket.socket) -> None:
    """End the whole process group when the control side goes away, even while the engine boots or hangs."""
    wire.send(lifeline, {"op": "hello", "role": "lifeline", "pid": os.getpid()})
    try:
        wire.receive(lifeline)
    except (wire.WireClosed, OSError):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Of a process that has imported everything: hooks, the CpuOps (None on a GPU), and what keeps CUDA out of it."""

    hooks: ImportHooks
    ops: Any
    cuda: Any = None

    def why(self) -> str:
        """Why it cannot be forked; empty where it can."""
        return "" if self.cuda is None else str(self.cuda.why())


def _imported(boot: dict[str, Any]) -> Prepared:
    """The patches, and behind them everything that SGLang's engine and schedulers import before they know more."""
    # what is reverted is each engine's own matter, and later
    os.environ.update({name: value for name, value in boot["environment"].items() if name != "SGLANG_DEBUG_REVERT_PR"})
    with installed_packages():  # as early as can be: it takes a child as long as torch's import takes this process
        hooks, ops = install_patches(boot)
        cuda = _kept_out() if boot["device"] == "cuda" else None
        leave_out_models(boot["model_files"])
        import sglang

        _check_version(sglang, boot)
        for name in ("server_args", "entrypoints.engine", "models.registry"):
            importlib.import_module(f"sglang.srt.{name}")
    return Prepared(hooks, ops, cuda)


def _kept_out() -> Any:
    """What keeps CUDA out of this process, from now on."""
    from eaglecheck_engine.engine_side.host.cuda_untouched import Untouched

    cuda = Untouched()
    cuda.install()
    return cuda


def main() -> None:
    if sys.argv[1] != FORK_SERVER:
        return _run(sys.argv[1])
    from eaglecheck_engine.engine_side.host import fork_server

    return _run(*fork_server.serve(socket.socket(fileno=int(sys.argv[2])), _imported, Prepared.why))


def _run(path: str, prepared: Prepared | None = None) -> None:
    """prepared: where this was forked from a process that has imported everything."""
    from eaglecheck_engine.both_sides.port_leases import take_ports
    from eaglecheck_engine.engine_side.host.request_service import serve
    from eaglecheck_engine.engine_side.host.resources import engine_arguments, gpu_used, take_lease

    sock = connect(path)
    wire.send(sock, {"op": "hello", "role": "host", "pid": os.getpid()})
    lifeline = connect(path)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    boot, _ = wire.receive(sock)
    held = take_lease(sock, boot)  # its locks end with this process and what is forked from it, however they end
    os.environ.update(boot["environment"])
    # storage behind a host cache is by default in a folder that all engines of a machine share
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(Path(os.environ["TMPDIR"]) / "hicache")
    os.environ[ENV_SOCKET] = path
    os.environ[ENV_BOOT] = json.dumps(boot)
    os.environ[ENV_PARENT] = str(os.getpid())
    try:
        with uncollected():
            # what was not forked imports everything here, so that others can be forked from it
            ready = prepared or (_imported(boot) if boot.get("forked") else Prepared(*install_patches(boot)))
            import sglang

        _check_version(sglang, boot)
        if boot.get("forked"):
            _fork_children(ready, boot, (sock, lifeline))
        ports = take_ports()  # as the leases
        os.environ.update(ports.environment)
        engine = sglang.Engine(**engine_arguments(boot, ports))
    except BaseException as error:
        traceback.print_exc()  # before anybody is told to read the log
        wire.send(sock, {"op": "boot_failed", "error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    wire.send(sock, {"op": "booted", "gpu_used_mib": gpu_used(held)})
    loop = getattr(engine, "loop", None) or asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def run() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        await serve(engine, reader, writer)

    try:
        loop.run_until_complete(run())
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        pass  # the control side closed: the normal end
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _in_child()
