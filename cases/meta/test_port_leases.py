"""Ports of engines that boot at the same time: blocks that never overlap, held until their process ends."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cases.meta import pretended_sglang
from harness.both_sides import port_leases
from harness.both_sides.gpus import CardError
from harness.engines.engine import Engine

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from harness.both_sides.port_leases import take_ports
ports = take_ports()
print(ports.first, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch, tmp_path):
    """A folder of locks of this test's own."""
    monkeypatch.setenv("EAGLECHECK_LEASES", str(tmp_path / "leases"))


@pytest.fixture
def holder():
    """holder(): a process that holds a block until its input ends."""
    started = []

    def start():
        started.append(
            subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        )
        return started[-1]

    yield start
    for process in started:
        process.communicate()


def block(process):
    return int(process.stdout.readline())


def test_processes_that_look_at_the_same_time_get_blocks_of_their_own(holder, monkeypatch):
    processes = [holder() for _ in range(16)]
    firsts = sorted(map(block, processes))
    assert all(after - before >= port_leases.PORTS for before, after in itertools.pairwise(firsts))


def test_one_process_gets_many_blocks_and_each_once():
    held = [port_leases.take_ports() for _ in range(64)]
    assert len({port for one in held for port in range(one.first, one.first + port_leases.PORTS)}) == 64 * 32


def free_but_for(monkeypatch, *ports):
    """Which ports other programs of this machine hold is not the test's business: of all but these it is not asked."""
    asked = port_leases._is_free
    monkeypatch.setattr(port_leases, "_is_free", lambda port: port not in ports or asked(port))


def test_a_block_ends_with_its_process(holder, monkeypatch):
    free_but_for(monkeypatch)
    monkeypatch.setattr(port_leases, "_end", lambda: port_leases.FIRST_PORT + port_leases.PORTS)
    with port_leases.ports_held() as mine:
        assert mine.first == port_leases.FIRST_PORT
        with pytest.raises(RuntimeError, match="no 32 ports in a row are free"):
            port_leases.take_ports()
    process = holder()
    other = block(process)
    monkeypatch.setattr(port_leases, "FIRST_PORT", other)
    monkeypatch.setattr(port_leases, "_end", lambda: other + port_leases.PORTS)
    with pytest.raises(RuntimeError):
        port_leases.take_ports()
    process.kill()
    process.wait()
    assert port_leases.take_ports().first == other


def test_a_block_with_a_port_in_use_is_passed_over(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        free_but_for(monkeypatch, taken)
        monkeypatch.setattr(port_leases, "FIRST_PORT", taken - 31)
        monkeypatch.setattr(port_leases, "_end", lambda: taken - 31 + 2 * port_leases.PORTS)
        with port_leases.ports_held() as ports:
            assert ports.first == port_leases.FIRST_PORT + port_leases.PORTS


@pytest.mark.parametrize(
    ("written", "end"), [("32768\t60999\n", 32768), ("1024\t65535\n", 50000), ("55000 60999", 50000), ("?", 50000)]
)
def test_ports_that_the_system_gives_to_connections_are_left_out(monkeypatch, tmp_path, written, end):
    file = tmp_path / "range"
    file.write_text(written)
    monkeypatch.setattr(port_leases, "CONNECTIONS", file)
    assert port_leases._end() == end


def test_what_sglang_counts_from_its_port_stays_inside_the_block():
    with port_leases.ports_held() as ports:
        block = range(ports.first, ports.first + port_leases.PORTS)
        derived = range(ports.arguments["port"] + 233, ports.arguments["port"] + 233 + 15)  # 0.5.23: 1 + 6 + 8 ranks
        searched = range(int(ports.environment["SGLANG_PORT"]), int(ports.environment["SGLANG_PORT"]) + 9)
        assert set(derived) | set(searched) | {ports.arguments["nccl_port"]} <= set(block)
        assert not {ports.arguments["nccl_port"]} & (set(derived) | set(searched))


def test_a_folder_that_cannot_be_written_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLECHECK_LEASES", str(tmp_path / "file" / "below"))
    with pytest.raises(CardError, match="export EAGLECHECK_LEASES="):
        port_leases.take_ports()


def test_an_engine_holds_its_block_as_long_as_it_lives(tmp_path):
    site = pretended_sglang.furnish(tmp_path / "site")
    engine = Engine(launch=pretended_sglang.launch(site, None), log=tmp_path / "engine.log")
    try:
        engine.boot()
        (lock,) = (tmp_path / "leases").glob("ports-*")
        assert held_by_another(lock)
    finally:
        engine.close()
    assert not held_by_another(lock)


def held_by_another(lock):
    script = "import fcntl, sys\nwith open(sys.argv[1]) as f: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", script, str(lock)], capture_output=True).returncode != 0
