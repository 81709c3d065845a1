"""What stands in for the engine host where only forking matters: it imports nothing, and a fork says who it is."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from cases.meta.processes import LONG
from harness.engines import process
from harness.engines.process import Known, Launch, Started

ROOT = Path(__file__).resolve().parents[2]
#: Stands in for the engine host: what it would import is a name in its environment; a fork says who it is and ends.
HOST = f"""
import gc, json, os, signal, socket, sys, tempfile, time
sys.path.insert(0, {str(ROOT)!r})
from harness.engine_side.host.fork_server import serve

imported, collections = [], []
gc.callbacks.append(lambda phase, _: collections.append(phase))

def prepare(boot):
    os.environ["IMPORTED"] = boot["word"]
    imported.extend([] for _ in range(10_000))
    if boot["word"] == "broken":
        raise ImportError("no such module")
    while boot["word"].startswith("/") and not os.path.exists(boot["word"]):
        time.sleep(0.01)
    collections.clear()
    return [os.getpid(), tempfile.gettempdir(), gc.isenabled()]

def refused(prepared):
    prepared.append(len(collections))
    return os.environ.get("NOT", "")

assert sys.argv[1] == "fork-server"
orders = socket.socket(fileno=int(sys.argv[2]))
path, (imported_by, _, collected, looked_through) = serve(orders, prepare, refused)
print("written by a fork", flush=True)
if "STAYS" in os.environ:
    signal.pause()
answer = {{"pid": os.getpid(), "session": os.getsid(0), "folder": os.getcwd(), "temporary": tempfile.gettempdir()}}
answer["collects"] = [collected, looked_through, gc.isenabled()]
answer |= {{"imported_by": imported_by, "chance": __import__("random").random(), "environment": dict(os.environ)}}
with open(path + ".part", "w") as file:
    json.dump(answer, file)
os.rename(path + ".part", path)
os._exit(7)
"""


class Forks(Protocol):
    """A fork server, one's own or another process's."""

    def start(self, launch: Launch, log: Path, path: str, environment: Mapping[str, str], known: Known) -> None: ...


def pretended_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """The launch of such a host, whose file lies in `folder`."""
    (folder / "host.py").write_text(HOST)
    monkeypatch.setattr(process, "HOST", folder / "host.py")
    boot = {"forked": True, "word": "yes", "environment": {"A": "1"}, "arguments": {"k": 3}, "flags": []}
    return Launch(python=Path(sys.executable), pythonpath=(), boot=boot)


def of_word(launch: Launch, word: str) -> Launch:
    """Another kind: `broken` is not imported, the name of a file not before that is there."""
    return replace(launch, boot={**launch.boot, "word": word})


def start(server: Forks, launch: Launch, log: Path, path: str, environment: Mapping[str, str]) -> Started:
    """The host that was forked."""
    found = list[Started]()
    server.start(launch, log, path, environment, found.append)
    return found[0]


def fork(
    server: Forks, folder: Path, name: str, *, launch: Launch, **environment: str
) -> tuple[dict[str, Any], Started]:
    """(what a forked host said, its process), once it has ended; it must be waited for by whoever asks."""
    place = folder / name
    (place / "tmp").mkdir(parents=True)
    given = {"TMPDIR": str(place / "tmp"), "PATH": os.environ["PATH"], **environment}
    forked = start(server, launch, place / "log", str(place / "answer"), given)
    assert forked.wait(timeout=LONG) == 7
    return json.loads((place / "answer").read_text()), forked
