"""Hosts that are forked from a process which has imported everything: what they share, and what is their own."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cases.meta import pretended_forks
from cases.meta.pretended_forks import ROOT, pretended_launch, start
from cases.meta.processes import LONG, survivors, wait_until
from harness.driving.pool import COPIES, EnginePool
from harness.engines import fork_server, process
from harness.engines.errors import EngineError
from harness.engines.fork_server import ForkServer, ForkServers, can_fork, kind_of
from harness.engines.process import REVERT, HostProcess

#: A program whose only process is spawned, as SGLang spawns its own.
SPAWNS = f"""
import gc, multiprocessing, sys
sys.path.insert(0, {str(ROOT)!r})
from harness.engine_side.host.processes import uncollected_until_run

def work():
    print(imported_while, gc.isenabled())

if __name__ == "__mp_main__":
    uncollected_until_run()
    imported_while = gc.isenabled()
else:
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    return pretended_launch(tmp_path, monkeypatch)


@pytest.fixture
def server(launch, tmp_path):
    made = ForkServer(launch, tmp_path / "server.log")
    yield made
    made.close()


def fork(server, folder, name, *, launch=None, **environment):
    """Of a server that may not be ready; see pretended_forks.fork."""
    server.ready()
    return pretended_forks.fork(server, folder, name, launch=launch or server.launch, **environment)


def test_forked_hosts_share_what_was_imported_and_nothing_of_each_others_surroundings(server, tmp_path):
    one, _ = fork(server, tmp_path, "one", MINE="one", OURS="both")
    two, _ = fork(server, tmp_path, "two", ALSO="two", OURS="both")
    assert one["imported_by"] == two["imported_by"] not in (one["pid"], two["pid"], os.getpid())
    assert one["chance"] != two["chance"]
    for name, answer in (("one", one), ("two", two)):
        assert answer["session"] == answer["pid"]
        assert answer["folder"] == str(tmp_path / name)
        assert answer["temporary"] == answer["environment"]["TMPDIR"] == str(tmp_path / name / "tmp")
        assert answer["environment"]["IMPORTED"] == "yes"
        assert answer["environment"]["OURS"] == "both"
        assert (tmp_path / name / "log").read_text() == "written by a fork\n"
    assert ("MINE" in one["environment"], "MINE" in two["environment"], "ALSO" in two["environment"]) == (1, 0, 1)


def test_python_collects_garbage_from_when_everything_is_imported(server, tmp_path):
    answer, _ = fork(server, tmp_path, "one")
    assert answer["collects"] == [False, 0, True], "nor through what was imported, once it is"
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = subprocess.run([sys.executable, tmp_path / "spawns.py"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_how_a_forked_host_ended_can_be_read_by_others_until_it_is_waited_for(server, tmp_path):
    place = tmp_path / "one"
    place.mkdir()
    server.ready()
    forked = start(server, server.launch, place / "log", str(place / "answer"), dict(os.environ))
    watched = psutil.Process(forked.pid)
    assert survivors([watched]) == []
    assert forked.poll() == forked.poll() == 7
    assert watched.status() == psutil.STATUS_ZOMBIE
    assert forked.wait(timeout=LONG) == 7
    assert not psutil.pid_exists(forked.pid)


def test_a_fork_server_ends_with_whoever_holds_it_and_leaves_no_folder(server, tmp_path):
    server.ready()
    process, folder = psutil.Process(server._process.pid), Path(server._folder.name)
    assert folder.is_dir()
    server._orders.close()  # as when this process ends
    assert survivors([process]) == []
    server.close()
    assert not folder.exists()


def test_what_cannot_be_imported_is_an_error_that_names_the_log(launch, tmp_path):
    broken = replace(launch, boot={**launch.boot, "word": "broken"})
    made = ForkServer(broken, tmp_path / "server.log")
    with pytest.raises(EngineError, match=r"SGLang could not be imported .*its log: .*server\.log"):
        made.ready()
    assert "ImportError: no such module" in (tmp_path / "server.log").read_text()
    assert made._process is None


def test_a_fork_server_that_was_killed_is_an_error_and_not_a_wait(server, tmp_path):
    server.ready()
    server._process.kill()
    with pytest.raises(EngineError, match="the process that engines are forked from is gone"):
        start(server, server.launch, tmp_path / "log", str(tmp_path / "answer"), {})


def test_a_fork_server_that_is_ended_while_it_is_asked_is_an_error_of_that_engine(server, tmp_path):
    """As when a run ends while an engine boots ahead: whoever waits is told, and does not wait on."""
    server.ready()
    server._process.send_signal(signal.SIGSTOP)  # it will not answer
    ends = threading.Timer(0.2, server.close)
    ends.start()
    with pytest.raises(EngineError, match="the process that engines are forked from is gone"):
        start(server, server.launch, tmp_path / "log", str(tmp_path / "answer"), {})
    ends.join()


@pytest.mark.parametrize("forks", [False, True])
def test_an_interrupt_during_a_fork_is_heard_at_once_and_what_nobody_knows_of_ends(
    server, launch, tmp_path, monkeypatch, forks
):
    """forks: it has, and its answer comes with the interrupt; else it hangs."""
    server.ready()
    running, asked, made = psutil.Process(server._process.pid), [], []
    if not forks:
        running.suspend()

    def select(*sockets):
        asked.append(sockets)
        if forks:
            made.extend(wait_until(running.children))
        signal.raise_signal(signal.SIGINT)
        return [], [], []

    monkeypatch.setattr(fork_server, "select", SimpleNamespace(select=select))
    monkeypatch.setattr(process, "BOOT_SECONDS", 1.0)
    monkeypatch.setenv("STAYS", "1")
    host = HostProcess(launch=launch, log=tmp_path / "log", start=server.start)
    with pytest.raises(KeyboardInterrupt):
        host.boot()
    assert len(asked) == 1
    assert survivors([running, *made]) == []


def test_an_interrupt_with_the_answer_of_a_fork_leaves_no_host(server, launch, tmp_path, monkeypatch):
    server.ready()
    made, receive = [], fork_server.wire.receive

    def interrupted(orders):
        answer = receive(orders)
        made.append(psutil.Process(answer[0]["pid"]))
        signal.raise_signal(signal.SIGINT)
        return answer

    monkeypatch.setattr(fork_server.wire, "receive", interrupted)
    monkeypatch.setenv("STAYS", "1")
    host = HostProcess(launch=launch, log=tmp_path / "log", start=server.start)
    with pytest.raises(KeyboardInterrupt):
        host.boot()
    assert survivors(made) == []
    assert len(made) == 1


def test_an_interrupt_while_it_is_ended_leaves_nothing_and_is_heard(server, tmp_path, monkeypatch):
    """As of a night's job, which is told to end while it does."""
    server.ready()
    running, folder, children = psutil.Process(server._process.pid), server._folder.name, fork_server._children

    def interrupted(pid):
        signal.raise_signal(signal.SIGINT)
        return children(pid)

    monkeypatch.setattr(fork_server, "_children", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    assert survivors([running]) == []
    assert not Path(folder).exists()


def test_what_is_asked_for_while_all_are_ended_does_not_stay(launch, tmp_path, monkeypatch):
    kept, made, asked = ForkServers(tmp_path), [], []
    begin = ForkServer.begin

    def ended_before(self):
        kept.close()
        begin(self)
        asked.append(self)  # or it would end as nobody holds it
        made.append(psutil.Process(self._process.pid))

    monkeypatch.setattr(ForkServer, "begin", ended_before)
    kept.begin(launch)
    assert survivors(made) == []


def test_one_fork_server_serves_its_kind_and_another_kind_gets_one_of_its_own(launch, tmp_path):
    kept = ForkServers(tmp_path)
    other_arguments = replace(launch, boot={**launch.boot, "arguments": {"k": 1}})
    other_environment = replace(launch, boot={**launch.boot, "environment": {"A": "2"}})
    assert kind_of(launch) == kind_of(other_arguments) != kind_of(other_environment)
    reverting = {"revert": 25015, "environment": {**launch.boot.get("environment", {}), REVERT: "25015"}}
    assert kind_of(replace(launch, boot={**launch.boot, **reverting})) == kind_of(launch)
    first = kept.server(launch)
    assert kept.server(other_arguments) is first
    running = psutil.Process(first._process.pid)
    second = kept.server(other_environment)  # as a boot beside this one asks, before this one has forked
    assert second is not first
    hosts = [
        fork(first, tmp_path, f"host-{number}", launch=one)[1] for number, one in enumerate((launch, other_arguments))
    ]
    assert not first.needed
    first.hosts.add(hosts[0].pid)  # it lives
    assert kept.server(other_environment) is second
    assert running.is_running()
    first.hosts.clear()
    assert kept.server(other_environment) is second
    assert survivors([running]) == []
    assert kept.started == 2
    kept.close()
    with pytest.raises(EngineError, match="were ended"):
        kept.server(launch)


def test_imports_begin_before_anybody_waits_for_them_and_another_kind_does_not_end_them(launch, tmp_path):
    made = EnginePool(logs=tmp_path, copies=True)
    asked = replace(launch, boot={**launch.boot, "device": "cpu"})
    made.prepare(asked)
    (begun,) = made._fork_servers.servers.values()
    process = begun._process
    assert psutil.pid_exists(process.pid)
    other = made._fork_servers.server(replace(launch, boot={**launch.boot, "environment": {"A": "2"}}))
    assert (other.refused, other is begun) == ("", False)
    ready = made._fork_servers.server(made._copied(asked))
    assert (ready is begun, ready._process is process, made._fork_servers.started) == (True, True, 2)
    assert fork(ready, tmp_path, "one")[0]["imported_by"] == process.pid
    made.end()
    assert survivors([psutil.Process(process.pid)] if psutil.pid_exists(process.pid) else []) == []


def test_on_a_card_what_only_patches_for_a_cpu_look_at_makes_no_kind(launch):
    def kinds(device, **more):
        boots = [{**launch.boot, "device": device, "overlap": overlap, **more} for overlap in (True, False)]
        return {kind_of(replace(launch, boot=boot)) for boot in boots}

    assert (len(kinds("cuda")), len(kinds("cpu")), len(kinds("cuda", plugin="a worker"))) == (1, 2, 2)


def test_a_process_that_cannot_be_forked_says_why(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("NOT", "something initialised CUDA")
    kept = ForkServers(tmp_path)
    assert kept.server(launch).refused == "something initialised CUDA"
    kept.close()


@pytest.mark.parametrize("answer", [{"forked": False}, {"handoff": {"side": "decode"}}])
def test_what_differs_before_the_imports_is_not_forked(launch, answer):
    assert can_fork(launch)
    assert not can_fork(replace(launch, boot={**launch.boot, **answer}))


def test_every_part_of_a_boot_record_that_patches_look_at_makes_a_kind():
    """What `LATER` leaves out is read nowhere before everything is imported, but for whether there are ranks."""
    patches = (ROOT / "harness" / "engine_side" / "host" / "import_patches.py").read_text()
    assert [name for name in fork_server.LATER if f'boot["{name}"]' in patches] == ["arguments"]
    assert patches.count('boot["arguments"]') == patches.count('boot["arguments"]["enable_dp_attention"]') == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_sides_of_a_pair_are_copied_processes(launch, tmp_path, device):
    boot = {name: value for name, value in launch.boot.items() if name != "forked"} | {"device": device}
    asked = replace(launch, boot=boot, beside=replace(launch, boot=boot, ranks=2))
    made = EnginePool(logs=tmp_path, copies=True)._copied(asked)
    assert [(one.boot["forked"], one.boot["flags"]) for one in (made, made.beside)] == [(True, [COPIES])] * 2
    assert EnginePool(logs=tmp_path)._copied(asked) == asked
