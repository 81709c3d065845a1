"""Engines of several processes are forked from what one of them has imported."""

import os
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from cases.meta.pretended_forks import fork, of_word, pretended_launch, start
from cases.meta.processes import LONG, survivors, wait_until
from harness.driving.pool import EnginePool
from harness.engines.errors import EngineError
from harness.engines.fork_server import ForkServers, kind_of
from harness.engines.lent_servers import BorrowedServers, Lender


@pytest.fixture
def launch(tmp_path, monkeypatch):
    return pretended_launch(tmp_path, monkeypatch)


@pytest.fixture
def lender(tmp_path):
    with Lender(ForkServers(tmp_path / "logs", keeps=2)) as made:
        yield made


def _running(lender, launch):
    return psutil.Process(lender.servers.servers[kind_of(launch)]._process.pid)


def test_what_two_ask_for_is_forked_from_one_and_ends_as_if_it_were_their_own(lender, launch, tmp_path):
    importers = set()
    for name in ("one", "two"):
        borrowed = BorrowedServers(lender.path)
        borrowed.begin(launch)
        server = borrowed.server(launch)
        assert server.refused == ""
        answer, forked = fork(server, tmp_path, name, launch=launch, WHO=name)
        assert (answer["environment"]["WHO"], answer["folder"]) == (name, str(tmp_path / name))
        assert forked.poll() == 7
        assert not psutil.pid_exists(forked.pid), "it was let go"
        importers.add(answer["imported_by"])
        borrowed.close()
        with pytest.raises(EngineError, match="this run ends"):
            borrowed.server(launch)
    assert importers == {_running(lender, launch).pid}
    assert lender.servers.started == 1
    assert not lender.servers.servers[kind_of(launch)].needed


def test_nobody_waits_for_what_others_import(lender, launch, tmp_path):
    waits, borrowed = of_word(launch, str(tmp_path / "go")), BorrowedServers(lender.path)
    with ThreadPoolExecutor() as threads:
        slow = [threads.submit(borrowed.server, waits) for _ in range(2)]
        assert wait_until(lambda: lender.servers.started == 1)
        assert borrowed.server(launch).refused == ""
        assert not any(one.done() for one in slow)
        (tmp_path / "go").touch()
        assert [one.result(LONG).refused for one in slow] == ["", ""]
    assert lender.servers.started == 2


def test_kinds_that_nobody_asked_for_lately_end_and_those_that_are_needed_do_not(lender, launch, tmp_path):
    kinds, borrowed = [of_word(launch, word) for word in "abcd"], BorrowedServers(lender.path)
    (tmp_path / "host").mkdir()
    needed = borrowed.server(kinds[0])
    lives = start(needed, kinds[0], tmp_path / "log", str(tmp_path / "answer"), {**os.environ, "STAYS": "1"})
    fork(borrowed.server(kinds[1]), tmp_path, "b", launch=kinds[1])
    fork(borrowed.server(kinds[2]), tmp_path, "c", launch=kinds[2])
    second = _running(lender, kinds[1])
    fork(borrowed.server(kinds[3]), tmp_path, "d", launch=kinds[3])
    assert survivors([second]) == []
    assert [kind_of(one) in lender.servers.servers for one in kinds] == [True, False, True, True]
    os.kill(lives.pid, 9)
    assert lives.wait(timeout=LONG) == -9


@pytest.mark.parametrize(
    ("word", "environment", "why"),
    [("broken", {}, r"could not be imported .*its log: .*fork-server-1\.log"), ("yes", {"NOT": "CUDA"}, "CUDA")],
)
def test_what_cannot_be_forked_says_why(launch, tmp_path, monkeypatch, word, environment, why):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Lender(ForkServers(tmp_path / "logs")) as lender:
        refused = BorrowedServers(lender.path).server(of_word(launch, word)).refused
        assert re.search(why, refused)
        assert not lender.servers.servers[kind_of(of_word(launch, word))].awaited


def test_who_waits_for_an_import_is_told_when_its_own_run_ends(lender, launch, tmp_path):
    waits, borrowed = of_word(launch, str(tmp_path / "never")), BorrowedServers(lender.path)
    ends = threading.Timer(0.2, borrowed.close)
    ends.start()
    with pytest.raises(EngineError, match="is gone"):
        borrowed.server(waits)
    ends.join()
    assert BorrowedServers(lender.path).server(launch).refused == ""


def test_all_that_was_lent_ends_with_the_lender_and_the_next_question_says_so(launch, tmp_path):
    with Lender(ForkServers(tmp_path / "logs")) as lender:
        server = BorrowedServers(lender.path).server(launch)
        running = _running(lender, launch)
    assert survivors([running]) == []
    assert not os.path.exists(os.path.dirname(lender.path))
    with pytest.raises(EngineError, match="the process that imports SGLang for all engines is gone"):
        start(server, launch, tmp_path / "log", str(tmp_path / "answer"), {})


def test_where_there_is_no_place_for_a_socket_nothing_is_lent(tmp_path, monkeypatch):
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    with Lender(ForkServers(tmp_path)) as lender:
        assert (lender.path, lender.servers.closed) == ("", True)
    assert not [*(tmp_path / ("x" * 100)).iterdir()]


def test_a_fork_server_that_was_killed_is_an_error_of_whoever_asks(lender, launch, tmp_path):
    server = BorrowedServers(lender.path).server(launch)
    _running(lender, launch).kill()
    with pytest.raises(EngineError, match="the process that engines are forked from is gone"):
        start(server, launch, tmp_path / "log", str(tmp_path / "answer"), {})


def test_in_place_of_one_that_somebody_ended_the_next_who_asks_gets_another(lender, launch, tmp_path):
    borrowed = BorrowedServers(lender.path)
    first, _ = fork(borrowed.server(launch), tmp_path, "one", launch=launch)
    running = _running(lender, launch)
    running.kill()
    assert survivors([running]) == []
    second, _ = fork(borrowed.server(launch), tmp_path, "two", launch=launch)
    assert first["imported_by"] == running.pid != second["imported_by"]


def test_a_pool_asks_the_lender_that_it_is_told_of(lender, launch, tmp_path):
    pool = EnginePool(logs=tmp_path, copies=True, lender=lender.path)
    pool.prepare(launch)
    assert lender.servers.started == 1
    pool.end()
    assert _running(lender, pool._copied(launch)).is_running()
