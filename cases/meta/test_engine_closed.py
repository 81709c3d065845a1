"""An engine that is closed before or while it boots, by whoever boots it or beside it: all that was started ends.

Its host is a process that never answers.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from cases.meta.processes import survivors, wait_until
from harness.engines import process
from harness.engines.engine import Engine
from harness.engines.errors import EngineError
from harness.engines.process import HostProcess, Launch, Peer

LAUNCH = Launch(python=Path("python"), pythonpath=(), boot={})


class Started:
    """Starts hosts that sleep, and knows them. before: called when a host is asked for, and not there yet."""

    def __init__(self):
        self.hosts, self.before = [], lambda: None

    def __call__(self, launch, log, path, environment, known):
        self.before()
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.hosts.append(subprocess.Popen(sleeps, start_new_session=True))
        known(self.hosts[-1])

    def left(self):
        return survivors([psutil.Process(one.pid) for one in self.hosts if psutil.pid_exists(one.pid)])


@pytest.fixture
def start(tmp_path, monkeypatch):
    """tmp_path: asked for first, or pytest would make its own folders in the one that goes with this."""
    made = Started()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a socket's path has room for about 100 characters
        monkeypatch.setattr(tempfile, "tempdir", short)
        monkeypatch.setattr(process, "BOOT_SECONDS", 60.0)
        yield made
        monkeypatch.undo()
    for one in made.hosts:
        one.kill()
        one.wait()


@pytest.fixture
def host(start, tmp_path):
    return HostProcess(launch=LAUNCH, log=tmp_path / "engine.log", start=start)


def closes(one):
    """Begin to close it in another thread, which has begun when this returns."""
    thread = threading.Thread(target=one.close)
    thread.start()
    wait_until(lambda: one._closed)
    return thread


def ended(start):
    assert start.left() == []
    assert os.listdir(tempfile.gettempdir()) == []


def test_one_that_is_closed_before_its_process_is_known_ends_it_at_once(host, start):
    beside = []
    start.before = lambda: beside.append(closes(host))
    with pytest.raises(EngineError, match="was ended while booting"):
        host.boot()
    beside[0].join()
    ended(start)


def test_one_that_is_closed_while_it_boots_says_so_and_whoever_closes_it_waits_for_that(host, start):
    beside = []
    with pytest.raises(EngineError, match="was ended while booting"):
        host.boot(lambda _text: beside or beside.append(closes(host)))
    beside[0].join()
    ended(start)


def test_one_that_is_closed_before_its_boot_starts_nothing(host, start):
    host.close()
    with pytest.raises(EngineError, match="was ended while booting"):
        host.boot()
    assert start.hosts == []
    ended(start)


def test_an_interrupt_while_it_is_closed_ends_it_first(host, start, monkeypatch):
    """As of a job of a night that is told to end while it does: nobody else would end the engine."""
    start(LAUNCH, host.log, "", {}, host._known)
    end = process.end_group

    def interrupted(group):
        signal.raise_signal(signal.SIGINT)
        end(group)

    monkeypatch.setattr(process, "end_group", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.close()
    ended(start)


def test_an_interrupt_while_it_boots_ends_it(host, start):
    with pytest.raises(KeyboardInterrupt):
        host.boot(lambda _text: signal.raise_signal(signal.SIGINT))
    ended(start)


@pytest.fixture
def stuck(monkeypatch):
    """A process that is killed and not gone."""

    class Stuck:
        pid = 1 << 30

        def poll(self):
            return None

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("it", timeout)

    monkeypatch.setattr(process, "end_group", lambda _pid: None)
    return Stuck()


def test_what_does_not_end_is_an_error_and_keeps_nothing_else_from_ending(stuck, start, tmp_path):
    launch = Launch(python=Path("python"), pythonpath=(), boot={}, beside=LAUNCH)
    engine = Engine(launch=launch, log=tmp_path / "engine.log", start=start)
    ours, theirs = os.pipe()
    os.close(theirs)

    class Sock:
        def close(self):
            os.close(ours)

    for side in engine.sides:
        side.process, side._folder = stuck, tempfile.TemporaryDirectory()
    engine.sides[0].peers["host"].append(Peer(sock=Sock(), hello={}))
    with pytest.raises(EngineError, match=r"killed and is not gone after 60 s; its log: .*engine"):
        engine.close()
    assert [side.process for side in engine.sides] == [None, None]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)
    engine.close()
    ended(start)
