"""What fails on our side of the engine is never reported as SGLang's doing, and no process outlives its owner."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.both_sides import wire
from harness.engines.errors import EngineCrashed, EngineError, EngineLost
from harness.engines.process import Launch, Peer
from harness.engines.side import Side

HOST = Path(__file__).parents[2] / "harness" / "engine_side" / "host" / "engine_host.py"
DEFECT = {"op": "error", "what": "our probe failed: KeyError: 'x'", "trace": "Traceback …"}
LATE = {"op": "error", "what": "announced, but SGLang's tokenizer never passed on: a"}
WORDS = r"^harness defect, which says nothing about SGLang: our probe failed: KeyError: 'x'$"
CRASH = {"op": "crashed", "site": "srt/managers/scheduler.py:run", "error": "RuntimeError: closed", "when": 0.0}


@pytest.fixture
def side_of(tmp_path):
    """side_of(messages of each rank, in order): a side whose ranks say these and then end."""

    def made(*said):
        launch = Launch(python=Path(sys.executable), pythonpath=(), boot={}, ranks=len(said))
        engine = Side(launch=launch, log=tmp_path / "log")
        for number, messages in enumerate(said):
            ours, theirs = socket.socketpair()
            for message in messages:
                wire.send(theirs, message)
            theirs.close()
            hello = {"role": "scheduler", "pid": 1, "dp_rank": number, "tp_rank": number}
            engine.ranks.append(Peer(sock=ours, hello=hello))
        return engine

    return made


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (([CRASH], [DEFECT]), EngineError, WORDS),
        (([CRASH], []), EngineCrashed, r"srt/managers/scheduler\.py:run"),
        (([LATE], []), EngineError, r"^announced, but SGLang's tokenizer never passed on: a$"),
    ],
    ids=["ours outweighs the crash it causes", "a crash", "what SGLang did not do is not ours"],
)
def test_whose_defect_it_is_where_ranks_fall(side_of, said, error, words):
    with pytest.raises(error, match=words):
        side_of(*said)._receive_all()


def test_a_last_message_about_a_defect_of_ours_is_received_when_the_process_is_gone(side_of):
    with pytest.raises(EngineError, match=WORDS):
        side_of([DEFECT]).ask_ranks({"op": "flush"})
    with pytest.raises(EngineLost, match="how is not known"):
        side_of([]).ask_ranks({"op": "flush"})


START = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("host", sys.argv[1])
host = sys.modules["host"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(host)
os.environ[host.ENV_PARENT] = sys.argv[2] or str(os.getppid())
host.die_with_parent()
print("lives", os.environ[host.ENV_PARENT] == str(os.getpid()))
"""


@pytest.mark.parametrize(("parent", "code"), [("", 0), ("1", -signal.SIGKILL)])
def test_a_process_whose_parent_ended_before_it_asked_for_the_signal_ends_at_once(parent, code):
    if os.getpid() == 1:
        pytest.skip("process 1 is the parent that the test names as gone")
    done = subprocess.run([sys.executable, "-P", "-c", START, str(HOST), parent], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("lives True\n" if code == 0 else "")


def test_a_log_that_is_empty_since_its_disk_is_full_says_so(full_disk, tmp_path):
    launch = Launch(python=Path(sys.executable), pythonpath=(), boot={})
    for folder, full in ((full_disk, True), (tmp_path, False)):
        (folder / "log").touch()
        assert ("the disk is full" in Side(launch=launch, log=folder / "log").log_tail()) is full
