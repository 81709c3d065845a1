"""Engines that do not start, from the command line: UNKNOWN with the log's last lines, and nothing left behind.

Most use pretended engines (shell scripts), so that every way to fail costs a second. Engines that die later are in
the tests of the engine itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace

import psutil
import pytest

from cases.meta import pretended_engine
from cases.meta.command_line import call
from cases.meta.processes import survivors, tree, wait_until
from harness.archive.store import RunReader
from harness.contract.types import Outcome
from harness.contract.words import counted
from harness.engines import dependencies, envs, process
from reports import live


@pytest.fixture
def unknown(work):
    """unknown(body=…): a run of one scenario that exits with 3; what it printed."""

    def run(*more, **furnished):
        pretended_engine.furnish(work / "home", **furnished)
        done = call("run", "--scenario", "single", *more, code=3)
        assert "Traceback" not in done.stderr
        return done

    return run


def only_run(work):
    (folder,) = (path for path in (work / "runs").iterdir() if not path.is_symlink())
    return folder


def test_an_engine_that_ends_while_booting_is_unknown_with_the_end_of_its_log(work, unknown):
    done = unknown("--scenario", "idle-between", "--json", "out.json")
    assert "no verdict on single: the engine ended with code 1 while booting" in done.stdout
    assert "ModuleNotFoundError: No module named 'sglang'" in done.stdout
    assert "2 of 2 scenarios could not be judged" in done.stdout.splitlines()[-1], "not tried again for the second"
    assert RunReader.open(only_run(work)).verdict.outcome is Outcome.UNKNOWN
    document = json.loads((work / "out.json").read_text())
    assert document["verdict"] == "UNKNOWN"
    assert "No module named 'sglang'" in document["reasons"][0]


def test_a_matrix_of_engines_that_do_not_start_is_unknown(work):
    pretended_engine.furnish(work / "home")
    done = call("matrix", "--engines", "0.5.11,0.5.23", "--cases", "pr25015", "--json", "out.json", code=3)
    cells = json.loads((work / "out.json").read_text())["cells"]
    assert [(cell["verdict"], cell["first"], cell["text_identical"]) for cell in cells] == [("UNKNOWN", None, None)] * 2
    assert "not as expected: pr25015 on 0.5.11 is UNKNOWN, not FAIL" in done.stdout


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        pytest.param(lambda python: python.chmod(0o644), "Permission denied", id="not-executable"),
        pytest.param(lambda python: python.write_bytes(b"\x7fELF"), "Exec format error", id="no-program"),
        pytest.param(lambda python: python.write_text("#!/no/such/shell\n"), "No such file", id="interpreter-gone"),
    ],
)
def test_an_interpreter_that_cannot_be_started_is_unknown(work, damage, why):
    pretended_engine.furnish(work / "home")
    python = dependencies.interpreter(dependencies.location())
    damage(python)
    done = call("run", "--scenario", "single", code=3)
    assert f"cannot start {python}: {why}" in done.stdout


def test_an_engine_that_never_answers_is_given_up_and_ended_and_the_wait_is_not_silent(work, unknown, monkeypatch):
    monkeypatch.setattr(process, "BOOT_SECONDS", 2.5)
    monkeypatch.setattr(live, "PULSE_SECONDS", 0.9)
    before = psutil.Process().children(recursive=True)  # this worker may have a live engine, for other tests
    done = unknown(body=pretended_engine.SLEEPS)
    assert "the engine did not boot within" in done.stdout
    assert survivors(set(psutil.Process().children(recursive=True)) - set(before)) == []
    log = str(only_run(work).relative_to(work) / "engine.log")
    pulses = [line for line in done.stdout.splitlines() if line.startswith("SGLang 0.5.23 booting (")]
    assert 1 <= len(pulses) <= 2
    assert [line for line in pulses if not line.endswith(log)] == []


MATRIX = ("matrix", "--engines", "0.5.13", "--cases", "pr25015")


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        ("EAGLECHECK_HOME", ("run",)),
        ("EAGLECHECK_HOME", MATRIX),
        ("EAGLECHECK_HOME", ("engines", "install", "0.5.13")),
        ("EAGLECHECK_RUNS", ("run",)),
        ("EAGLECHECK_RUNS", MATRIX),
    ],
)
def test_a_place_that_cannot_be_written_to_is_a_usage_error_whichever_it_is(work, monkeypatch, command, variable):
    (work / "file").write_text("")
    monkeypatch.setenv(variable, str(work / "file" / "below"))
    done = call(*command)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert f"{work / 'file' / 'below'}: Not a directory" in done.stderr


def test_a_folder_for_sockets_whose_name_is_too_long_is_named(work, unknown, monkeypatch):
    deep = work / ("long" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert "export TMPDIR=/tmp" in unknown().stdout


def test_a_run_folder_that_cannot_be_written_any_more_is_unknown_and_no_fault_of_ours(unknown):
    done = unknown(body='rm -r "$PWD"; touch "$PWD"; exit 1')
    assert "cannot write to runs/" in done.stderr
    assert "is incomplete, 0 of 1 scenario judged" in done.stderr


STOPS = [pytest.param(number, id=number.name) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("number", STOPS)
def test_stopped_while_an_engine_boots(work, number):
    pretended_engine.furnish(work / "home", body=pretended_engine.SLEEPS)
    process = pretended_engine.start("run", cwd=work, home=work / "home")
    wait_until(lambda: any("started" in log.read_text() for log in work.glob("runs/*/engine.log")), process=process)
    assert _check_stopped(process, number, work) == 0
    call("recheck", "runs/latest", code=3)  # there is nothing to judge


@pytest.mark.engine(ends_it=True)
def test_stopped_in_the_middle_of_a_scenario(tmp_path, monkeypatch):
    """With a real engine: the first scenario is judged, the second cut off, and what was judged can be looked at."""
    process = pretended_engine.start(
        *("run", "--scenario", "single", "--scenario", "four-together", "--scenario", "idle-between"), cwd=tmp_path
    )
    wait_until(
        lambda: len(list(tmp_path.glob("runs/*/single-*/verdict.json"))) > 1, process=process
    )  # also below `latest`
    judged = _check_stopped(process, signal.SIGINT, tmp_path)
    assert 1 <= judged < 3  # a second one may end before the signal is there
    monkeypatch.chdir(tmp_path)
    again = call("recheck", "runs/latest", code=3)
    assert f"cut off while running; {counted(judged, 'scenario')} of it can be judged" in again.stdout


def _check_stopped(process, number, work):
    """One message, exit 3, no process left, no verdict: after a signal. How many scenarios were judged by then."""
    below = tree(process.pid)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 3, errors
    folder = only_run(work).relative_to(work)
    word = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
    judged = len(list((work / folder).glob("*/verdict.json")))
    assert errors.startswith(f"eaglecheck: {word}\n  run folder {folder} is incomplete, {judged} of ")
    assert survivors(below) == []
    assert not (work / folder / "verdict.json").exists()
    return judged


STARTS = """
import os, pathlib, sys
from cases.meta import pretended_engine
from harness.engines import envs
from harness.driving import runner
from harness.cli.main import app
from harness.engines import process

def spawn(*_):
    print("slow:", sorted({"torch", "transformers", "pandas", "hypothesis", "sglang"} & set(sys.modules)), flush=True)
    os._exit(0)

envs.current = lambda: None
runner.load_oracle = lambda *_: None  # imports torch in another thread, while the engine boots
process.environment_of = spawn
pretended_engine.furnish(pathlib.Path(os.environ["EAGLECHECK_HOME"]))
app(["run"])
"""


def test_no_torch_before_an_engine_process_is_started(tmp_path):
    """Start-up time is the user's time: torch alone takes two seconds."""
    environment = {**os.environ, "EAGLECHECK_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", STARTS], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["slow: []"], done.stderr


@pytest.mark.usefixtures("work")
def test_a_checkout_that_cannot_see_its_tags_is_refused_before_a_boot(monkeypatch):
    here = replace(envs.state("0.5.23"), version="0.0.0.dev1+gabcdef012", ready=True)
    monkeypatch.setattr(envs, "current", lambda: here)
    said = "fetch them and install it again:  git fetch --tags && pip install -e python\n"
    refused = call("run")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.endswith(said)
    doctor = call("doctor")
    assert (doctor.exit_code, "to fix it:  git fetch --tags && pip install -e python\n" in doctor.stdout) == (3, True)


@pytest.mark.usefixtures("work")
def test_a_checkout_beside_us_says_that_no_test_ran_on_it(monkeypatch):
    here = replace(envs.state("0.5.23"), version="0.5.24.dev12+gabcdef012", ready=True)
    monkeypatch.setattr(envs, "current", lambda: here)
    said = "in this environment; not in our tests; driven with the hooks of 0.5.23\n"
    assert said in call("engines", "list").stdout
