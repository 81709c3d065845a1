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
from harness.engines.endings import MAIN, Endings, stopped
from harness.engines.errors import EngineCrashed, EngineHung, EngineLost
from harness.engines.process import Launch, Peer
from harness.engines.side import Side

WAITS = "import sys; sys.stdin.read()"


@pytest.fixture
def engine_over(tmp_path):
    """engine_over(code): an engine whose one rank is a Python process of that code, watched like SGLang's."""
    started = []

    def made(code=WAITS):
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        log = tmp_path / "engine.log"
        log.write_text("server started\n")
        engine = Side(launch=Launch(python=Path(sys.executable), pythonpath=(), boot={}), log=log)
        engine.ranks.append(Peer(sock=ours, hello={"role": "scheduler", "pid": process.pid, "dp_rank": 0}))
        engine.endings = Endings(processes={process.pid: "scheduler"}, log=log)
        engine.endings.start()
        started.append((engine, process))
        return engine, process

    yield made
    for engine, process in started:
        engine.close()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_somebody_is_no_finding(engine_over, number):
    engine, process = engine_over()
    process.send_signal(number)
    with pytest.raises(
        EngineLost, match=rf"^ended from outside: scheduler process {process.pid} was ended by {number.name}, which"
    ) as told:
        engine._receive(engine.ranks[0])
    assert "then run it again" in str(told.value)
    assert "it ends with:\n  server started" in str(told.value)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_a_signal_for_what_a_process_did_itself_is_its_crash(engine_over, number):
    engine, process = engine_over()
    process.send_signal(number)
    with pytest.raises(EngineCrashed, match=rf"was ended by {number.name} without a word") as told:
        engine._receive(engine.ranks[0])
    assert told.value.report["site"] == number.name


@pytest.fixture
def family(tmp_path):
    """(watch, main process, child), both waiting; the child is no real one of the other."""
    main, child = (subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) for _ in range(2))
    watch = Endings(processes={main.pid: MAIN, child.pid: "SGLang's own"}, log=tmp_path / "engine.log")
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
    monkeypatch.setattr("harness.engines.endings.ALONE_SECONDS", 0.05)
    watch, _, child = family
    child.kill()
    assert watch.first(child.pid).pid == child.pid


def test_a_process_that_leaves_by_itself_has_crashed(engine_over):
    engine, _ = engine_over("raise SystemExit(7)")
    with pytest.raises(EngineCrashed, match=r"ended with code 7 without a word") as told:
        engine._receive(engine.ranks[0])
    assert told.value.report["site"] == "exit-7"


def test_what_sglang_kills_after_one_of_its_processes_failed_is_its_crash(engine_over):
    engine, process = engine_over()
    engine.endings.mark()
    with engine.log.open("a") as log:
        log.write("SIGQUIT received. signum=3, frame=x. It usually means one child failed.\n")
    process.kill()
    with pytest.raises(EngineCrashed, match="was ended by SIGKILL without a word"):
        engine._receive(engine.ranks[0])


def test_what_the_log_said_of_an_earlier_scenario_does_not_make_a_kill_a_crash(engine_over):
    engine, process = engine_over()
    engine.log.write_text("Scheduler hit an exception: x\n")
    engine.endings.mark()
    process.kill()
    with pytest.raises(EngineLost):
        engine._receive(engine.ranks[0])


def test_a_stopped_process_is_no_hang(engine_over):
    engine, process = engine_over()
    with pytest.raises(EngineHung):
        engine._receive(engine.ranks[0], seconds=0.05)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert stopped(process.pid)
    with pytest.raises(EngineLost, match=rf"process {process.pid} is stopped, as by SIGSTOP or a debugger"):
        engine._receive(engine.ranks[0], seconds=0.05)


def test_ctrl_c_that_reached_a_scheduler_is_no_finding(engine_over):
    engine, _ = engine_over()
    with pytest.raises(EngineLost, match="a scheduler was interrupted"):
        raise engine._crashed({"error": "KeyboardInterrupt: ", "site": "x"}, {})


@pytest.fixture
def cut():
    """A scenario whose engine's last batch was cut off before its extend, and then nothing more came."""
    scenario = handmade.scenario()
    engine, _ = handmade.build(scenario)
    last = engine.rounds[-1].index
    keep = [
        row
        for row in range(len(engine.rows))
        if not (engine.rows.key(row).phase == "EXTEND" and engine.rows.ints["round"][row] == last)
    ]
    return scenario, replace(engine, rows=handmade.take_rows(engine.rows, keep), ends=())


def lost(trace, **data):
    return replace(
        trace, events=(*trace.events[:1], Event(name="lost", tick=2, data={"what": "ended from outside: x", **data}))
    )


def test_what_an_end_from_outside_cut_off_is_not_held_against_sglang(cut):
    scenario, trace = cut
    verdict, divergences = judge(scenario, lost(trace), None)
    assert verdict.outcome is Outcome.UNKNOWN
    assert divergences == []
    assert verdict.reasons[0] == "ended from outside: x"
    assert verdict.root_kinds == verdict.kinds == ()


def test_what_was_wrong_before_an_end_from_outside_is_still_a_finding(cut):
    scenario, trace = cut
    rows = trace.rows
    row = next(row for row in range(len(rows)) if rows.key(row).phase == "DRAFT")
    rows.ints["position"][row] += 1
    verdict, divergences = judge(scenario, lost(trace), None)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.root_kinds == ("POSITION",)
    assert [found.first for found in divergences] == [True]
    assert "ended from outside: x" in verdict.reasons


def test_a_trace_of_before_the_question_was_asked_is_not_held_against_sglang_either(cut):
    scenario, trace = cut
    data = {"site": "killed", "error": "scheduler process 7 ended without a word"}
    verdict, _ = judge(
        scenario, replace(trace, events=(*trace.events[:1], Event(name="crash", tick=2, data=data))), None
    )
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.reasons[0] == "scheduler process 7 ended without a word; how is not known"
