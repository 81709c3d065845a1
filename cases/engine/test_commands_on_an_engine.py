"""What commands do with a real engine's run: judge it again, replay it, show its cells, survive a full disk.

They run on the worker's live engine, so none of these tests boots one for itself alone.
"""

import errno
import json
import os
import subprocess
import sys

import pytest

from cases import catalogue
from cases.meta.command_line import call

POSITION_CASE = catalogue.load("pr25015")
BAD, GOOD = POSITION_CASE.bad_up_to, "0.5.13"
BOOT = POSITION_CASE.scenario.boot_key()

#: Ends the process at the first attempt to import sglang, and says so if it was there all along. To look whether it is
#: installed is allowed.
WITHOUT_SGLANG = """
import sys
from importlib.machinery import ModuleSpec
class Refuse:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.split(".")[0] == "sglang" else None
    def create_module(self, spec):
        raise SystemExit("sglang was imported")
    def exec_module(self, module):
        raise NotImplementedError
sys.meta_path.insert(0, Refuse())
from harness.cli.main import app
try:
    app()
finally:
    assert not any(name.split(".")[0] == "sglang" for name in sys.modules)
"""


@pytest.fixture
def failing_run(commands_on_live_engine, tmp_path):
    """A run of pr25015 on the release that has the bug: (its JSON, its reproducer)."""
    commands_on_live_engine.environment(BAD)  # skips where it is not installed; the command would install it
    report = tmp_path / "run.json"
    call("run", "--engine", BAD, "--scenario", "pr25015", "--runs", tmp_path / "runs", "--json", report, code=1)
    document = json.loads(report.read_text())
    return document, document["scenarios"][0]["reproducer"]


@pytest.mark.engine(release=BAD, boot=BOOT, ends_it=True)
def test_reproducer_replays_as_failed_where_it_was_made_and_fixed_on_a_release_with_the_fix(failing_run, tmp_path):
    _, reproducer = failing_run
    assert "FAILED" in call("replay", reproducer, "--runs", tmp_path / "again", code=1).output
    assert "FIXED" in call("replay", reproducer, "--engine", GOOD, "--runs", tmp_path / "fixed", code=0).output


@pytest.mark.engine(release=BAD, boot=BOOT)
def test_stored_run_is_judged_the_same_where_sglang_cannot_be_imported(failing_run, tmp_path):
    document, _ = failing_run
    report = tmp_path / "recheck.json"
    command = [sys.executable, "-c", WITHOUT_SGLANG, "recheck", document["run"], "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    again = json.loads(report.read_text())
    for name in ("verdict", "reasons", "findings", "coverage", "compared"):
        assert again[name] == document[name], name


@pytest.mark.engine(release=BAD, boot=BOOT)
def test_matrix_cell_names_the_first_wrong_place_and_the_identical_text(commands_on_live_engine, tmp_path):
    commands_on_live_engine.environment(BAD)
    report = tmp_path / "matrix.json"
    call("matrix", "--engines", BAD, "--cases", "pr25015", "--runs", tmp_path, "--json", report, code=0)
    (cell,) = json.loads(report.read_text())["cells"]
    assert (cell["engine"], cell["case"], cell["revert"]) == (BAD, "pr25015", None)
    assert (cell["verdict"], cell["kinds"], cell["text_identical"]) == ("FAIL", ["POSITION"], True)
    assert cell["as_expected"] is True
    place = {name: cell["first"][name] for name in ("rid", "committed_len", "phase", "step", "expected", "observed")}
    assert place == {"rid": "a", "committed_len": 7, "phase": "DRAFT", "step": 0, "expected": 7, "observed": 8}
    assert cell["first"]["round"] >= 0


@pytest.mark.engine(release=BAD, boot=BOOT)
def test_full_disk_ends_a_run_as_unknown_without_a_verdict(commands_on_live_engine, tmp_path, monkeypatch):
    commands_on_live_engine.environment(BAD)
    sync, left = os.fsync, [2]  # room for the manifest and the scenario, not for what comes after

    def full(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr("harness.archive.writer.os.fsync", full)
    done = call("run", "--engine", BAD, "--scenario", "pr25015", "--runs", tmp_path, code=3)
    assert "disk is full" in done.output
    assert not list(tmp_path.glob("*/verdict.json"))
