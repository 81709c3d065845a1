"""How a process ended is read from the process: who stopped an engine decides whether it is a finding."""

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cases.meta import handmade
from harness.checks.judge import judge
from harness.contract.trace import Event
from harness.contract.types import Outcome
from harness.engines.errors import EngineCrashed, EngineHung, EngineLost
from harness.engines.exits import MAIN, Exits
from harness.engines.process import Launch, Peer
from harness.engines.processes import SHARED_MEMORY, end_group
from harness.engines.side import Side

WAITS = "import sys; sys.stdin.read()"
#: Two files of shared memory, of which it keeps the first mapped.
MAPS = """
import mmap, sys
for name in sys.argv[1:]:
    with open(name, "wb+") as file:
        file.truncate(4096)
        kept = locals().get("kept") or mmap.mmap(file.fileno(), 4096)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def side_over(tmp_path):
    """side_over(code): a side whose one rank is a Python process of that code, watched like SGLang's."""
    started = []

    def made(code=WAITS):
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        log = tmp_path / "engine.log"
        log.write_text("server started\n")
        side = Side(launch=Launch(python=Path(sys.executable), pythonpath=(), boot={}), log=log)
        side.ranks.append(Peer(sock=ours, hello={"role": "scheduler", "pid": process.pid, "dp_rank": 0}))
        side.exits = Exits(processes={process.pid: "scheduler"}, log=log)
        side.exits.start()
        started.append((side, process))
        return side, process

    yield made
    for side, process in started:
        side.close()
        process.kill()
        process.communicate()


def ends(side, expected, match):
    """What is said of the end of the side's only rank."""
    with pytest.raises(expected, match=match) as caught:
        side._receive(side.ranks[0])
    return caught.value


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_somebody_is_no_finding(side_over, number):
    side, process = side_over()
    process.send_signal(number)
    words = rf"^ended from outside: scheduler process {process.pid} was ended by {number.name}, which"
    said = str(ends(side, EngineLost, words))
    assert "then run it again" in said
    assert "it ends with:\n  server started" in said


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_a_signal_for_what_a_process_did_itself_is_its_crash(side_over, number):
    side, process = side_over()
    process.send_signal(number)
    assert ends(side, EngineCrashed, rf"was ended by {number.name} without a word").report["site"] == number.name


def test_a_process_that_leaves_by_itself_has_crashed(side_over):
    side, _ = side_over("raise SystemExit(7)")
    assert ends(side, EngineCrashed, "ended with code 7 without a word").report["site"] == "exit-7"


@pytest.mark.parametrize("before", [True, False])
def test_what_sglang_kills_after_one_of_its_processes_failed_is_its_crash_in_that_scenario(side_over, before):
    side, process = side_over()
    if not before:
        side.exits.mark()
    with side.log.open("a") as log:
        log.write("SIGQUIT received. signum=3, frame=x. It usually means one child failed.\n")
    if before:
        side.exits.mark()
    process.kill()
    ends(side, EngineLost if before else EngineCrashed, "was ended by SIGKILL")


def test_a_stopped_process_is_no_hang(side_over):
    side, process = side_over()
    with pytest.raises(EngineHung):
        side._receive(side.ranks[0], seconds=0.05)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    with pytest.raises(EngineLost, match=rf"process {process.pid} is stopped, as by SIGSTOP or a debugger"):
        side._receive(side.ranks[0], seconds=0.05)


def test_ctrl_c_that_reached_a_scheduler_is_no_finding(side_over):
    side, _ = side_over()
    with pytest.raises(EngineLost, match="a scheduler was interrupted"):
        raise side._crashed({"error": "KeyboardInterrupt: ", "site": "x"}, {})


@pytest.fixture
def family(tmp_path):
    """(watch, main process, child), both waiting; the child is no real one of the other."""
    main, child = (subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) for _ in range(2))
    watch = Exits(processes={main.pid: MAIN, child.pid: "SGLang's own"}, log=tmp_path / "engine.log")
    watch.start()
    yield watch, main, child
    watch.stop()
    for process in (main, child):
        process.kill()
        process.communicate()


def test_a_main_process_that_was_killed_is_named_and_not_the_child_that_went_with_it(family):
    watch, main, child = family
    child.kill()
    late = threading.Timer(0.1, main.kill)
    late.start()
    assert watch.first(child.pid).pid == main.pid
    late.join()


def test_a_child_that_was_killed_alone_is_named(family, monkeypatch):
    monkeypatch.setattr("harness.engines.exits.ALONE_SECONDS", 0.05)
    watch, _, child = family
    child.kill()
    assert watch.first(child.pid).pid == child.pid


@pytest.fixture
def cut():
    """A scenario whose engine's last batch was cut off before its extend, and then nothing more came."""
    scenario = handmade.scenario()
    engine, _ = handmade.build(scenario)
    last = engine.rounds[-1].index
    extends = (engine.rows.strings["phase"] == "EXTEND") & (engine.rows.ints["round"] == last)
    return scenario, replace(handmade.without_rows(engine, *extends.nonzero()[0]), ends=())


def ended(trace, name, **data):
    return replace(trace, events=(*trace.events[:1], Event(name=name, scheduler_step=2, data=data)))


def lost(trace):
    return ended(trace, "lost", what="ended from outside: x")


def test_what_an_end_from_outside_cut_off_is_not_held_against_sglang(cut):
    scenario, trace = cut
    verdict, divergences = judge(scenario, lost(trace), None)
    assert verdict.outcome is Outcome.UNKNOWN
    assert divergences == []
    assert verdict.reasons[0] == "ended from outside: x"
    assert verdict.root_kinds == verdict.kinds == ()


def test_what_was_wrong_before_an_end_from_outside_is_still_a_finding(cut):
    scenario, trace = cut
    trace.rows.ints["position"][handmade.find(trace, phase="DRAFT")] += 1
    verdict, divergences = judge(scenario, lost(trace), None)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.root_kinds == ("POSITION",)
    assert [found.first for found in divergences] == [True]
    assert "ended from outside: x" in verdict.reasons


def test_a_kernel_that_sglang_has_for_other_devices_only_is_no_crash_of_its_own(cut):
    scenario, trace = cut
    crashed = ended(trace, "crash", site="srt/a.py:f", error="NameError: name 'copied' is not defined", lacks="copied")
    verdict, divergences = judge(scenario, crashed, None)
    assert (verdict.outcome, divergences) == (Outcome.UNKNOWN, [])
    assert verdict.reasons[0].startswith("SGLang imports copied for other devices only")


def test_a_kernel_that_this_machine_cannot_build_is_no_crash_of_sglangs(cut):
    scenario, trace = cut
    crashed = ended(trace, "crash", site="srt/a.py:f", error="RuntimeError: x", unbuilt="OSError: CUDA_HOME is not set")
    verdict, divergences = judge(scenario, crashed, None)
    assert (verdict.outcome, divergences) == (Outcome.UNKNOWN, [])
    assert verdict.reasons[0] == "a kernel could not be built on this machine: OSError: CUDA_HOME is not set"


def test_a_trace_of_before_the_question_was_asked_is_not_held_against_sglang_either(cut):
    scenario, trace = cut
    error = "scheduler process 7 ended without a word"
    verdict, _ = judge(scenario, ended(trace, "crash", site="killed", error=error), None)
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.reasons[0].startswith(error)


def test_an_ended_engine_leaves_nothing_in_shared_memory_that_it_mapped():
    mapped, other = (SHARED_MEMORY / f"eaglecheck test {os.getpid()} {number}" for number in (1, 2))
    command = [sys.executable, "-c", MAPS, mapped, other]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:
        with subprocess.Popen(command, **pipes, start_new_session=True) as process:
            assert process.stdout.readline() == b"there\n"
            end_group(process.pid)
        assert (process.returncode, mapped.exists(), other.exists()) == (-signal.SIGKILL, False, True)
    finally:
        mapped.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
