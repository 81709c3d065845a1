"""An engine that dies or hangs is a finding, one that somebody ended is none; the next scenario gets a new one.

No process is ever left behind.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from cases.meta.processes import survivors, tree, wait_until
from cases.programs import DEFAULT
from harness.contract.rows import INT_COLUMNS
from harness.contract.types import Kind, Outcome

SCENARIO = DEFAULT["staggered-arrivals"]
BOOT = SCENARIO.boot_key()
STEP = 5  # a is decoding and b has arrived


def _signal_scheduler(engine, number):
    """An observer that sends the signal to the scheduler after scheduler step STEP."""

    def on_step(scheduler_step, _state):
        if scheduler_step == STEP:
            os.kill(engine.handshakes[0]["pid"], number)

    return on_step


@pytest.mark.engine(boot=BOOT, ends_it=True)
def test_killed_engine_is_unknown_and_the_next_scenario_runs_as_if_nothing_had_been(engines, drive_scenario):
    before = drive_scenario(SCENARIO)
    engine = engines.use(engines.launch(SCENARIO))
    processes = tree(engine.process.pid)
    boots = engines.boots
    dead = drive_scenario(SCENARIO, on_step=_signal_scheduler(engine, signal.SIGKILL))
    assert dead.verdict.outcome is Outcome.UNKNOWN
    assert dead.findings == ()
    (why,) = dead.verdict.reasons[:1]
    assert re.match(
        r"ended from outside: scheduler process \d+ was ended by SIGKILL, which says nothing about SGLang", why
    )
    assert survivors(processes) == []
    assert 0 < len(dead.trace.rows) < len(before.trace.rows), "what was seen before the crash is kept"
    after = drive_scenario(SCENARIO, fresh=True)
    assert engines.boots == boots + 1
    assert after.passed, after.verdict.reasons
    for name in INT_COLUMNS:
        assert np.array_equal(before.trace.rows.ints[name], after.trace.rows.ints[name]), name


@pytest.mark.engine(boot=BOOT, ends_it=True)
def test_engine_that_ends_by_an_error_of_its_own_is_a_crash_finding(engines, drive_scenario):
    engine = engines.use(engines.launch(SCENARIO))
    dead = drive_scenario(SCENARIO, on_step=_signal_scheduler(engine, signal.SIGSEGV))
    assert dead.verdict.outcome is Outcome.FAIL
    assert dead.verdict.root_kinds == (Kind.CRASH,)
    assert dead.first.hint == "SIGSEGV"


@pytest.mark.engine(boot=BOOT, ends_it=True)
def test_engine_that_does_not_answer_in_time_is_a_hang_finding_and_is_ended(engines, drive_scenario, monkeypatch):
    engine = engines.use(engines.launch(SCENARIO))
    processes = tree(engine.process.pid)

    def on_step(scheduler_step, _state):
        if scheduler_step == STEP:
            monkeypatch.setattr("harness.engines.side.STEP_SECONDS", 1e-4)  # no step is as quick as that

    hung = drive_scenario(SCENARIO, on_step=on_step)
    assert hung.verdict.outcome is Outcome.FAIL
    assert hung.verdict.root_kinds == (Kind.HANG,)
    assert survivors(processes) == []


@pytest.fixture
def start(tmp_path):
    """start(*arguments): `eaglecheck run` as a process of its own, with its run folders under tmp_path."""
    started = []

    def run(*arguments):
        command = [sys.executable, "-c", "from harness.cli.main import app; app()", "run", "--runs", str(tmp_path)]
        process = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def _host(process):
    """The engine host among the children of a command (git is another, for a moment), once it is there."""
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(part.endswith("engine_host.py") for part in child.cmdline()):
                return child
    return None


def _steps(folder):
    logs = list(folder.glob("*/engine.jsonl"))
    lines = logs[0].read_text().splitlines() if logs else []
    return [line for line in lines if line.endswith("}") and json.loads(line)["event"] == "turn"]


@pytest.mark.engine(boot="own process")
def test_engine_ends_when_the_control_process_is_killed_during_a_step(engines, start, tmp_path):
    engines.close()  # this test's engine is in a process tree of its own
    process = start("--engine", engines.default)
    wait_until(lambda: len(_steps(tmp_path)) > STEP, process=process)
    processes = tree(process.pid)
    assert {process.pid, _host(process).pid} < {each.pid for each in processes}, "and the engine's own processes"
    process.kill()
    process.wait()
    assert survivors(processes) == []
    assert not list(tmp_path.glob("*/verdict.json")), "a run that was cut off has no verdict"


@pytest.mark.engine(boot="own process")
def test_interrupt_while_booting_leaves_no_engine_and_a_document_that_says_so(start, engines, tmp_path):
    process = start("--engine", engines.default, "--json", str(tmp_path / "out.json"))
    host = wait_until(lambda: _host(process), process=process)
    wait_until(lambda: len(tree(host.pid)) > 1, process=process)
    processes = tree(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 3, said
    assert "incomplete" in said
    assert survivors(processes) == []
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["interrupted"], document["verdict"], document["scenarios"]) == (True, "UNKNOWN", [])
