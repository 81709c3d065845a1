"""An environment whose `sglang` boots at once and computes nothing: the real engine host runs in it.

Its scheduler is a process of its own, as SGLang's is, and dies with its parent.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from harness.both_sides.leases import Request
from harness.engines.process import Launch

VERSION = "0.0.pretended"

PACKAGE = """
import os, socket, subprocess, sys
from eaglecheck_engine.both_sides import wire
__version__ = "0.0.pretended"

class Engine:
    def __init__(self, **arguments):
        if arguments.get("fails"):
            raise RuntimeError(arguments["fails"])
        code = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); print(flush=True); time.sleep(600)"
        self.scheduler = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self.scheduler.stdout.readline()  # as real ones, it dies with its host from before its first word on
        orphan = subprocess.Popen(["sleep", "60"], start_new_session=True).pid if arguments.get("orphan") else None
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(os.environ["EAGLECHECK_ENGINE_SOCKET"])
        wire.send(self.sock, {
            "op": "hello", "role": "scheduler", "pid": self.scheduler.pid, "dp_rank": 0, "tp_rank": 0,
            "orphan": orphan, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        })
"""
ARGUMENTS = "class ServerArgs:\n    pass\n"


def furnish(folder: Path) -> Path:
    """The folder to put on the engine's import path."""
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text(PACKAGE)
    (folder / "sglang" / "srt" / "__init__.py").write_text("")
    (folder / "sglang" / "srt" / "server_args.py").write_text(ARGUMENTS)
    return folder


def launch(site: Path, lease: Request | None, **arguments: Any) -> Launch:
    """An engine of that folder, which asks for the lease first.

    arguments: `fails`, what it says instead of booting; `orphan`, to leave a process behind that nothing ends.
    """
    boot = {
        "release": VERSION,
        "device": "cuda",
        "lease": None if lease is None else lease.plain(),
        "environment": {},
        "arguments": arguments,
        "server_args": arguments,
        "optional_arguments": {},
    }
    return Launch(python=Path(sys.executable), pythonpath=(site,), boot=boot)
