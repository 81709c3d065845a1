"""Commands on a machine whose cards are not there or not free: refused at once, or UNKNOWN with who has the card."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cases.meta import pretended_engine
from cases.meta.command_line import call
from cases.meta.pretended_card import app, used

#: An interpreter that runs the real engine host; a lease is taken before it looks for SGLang.
HOST = f'exec {sys.executable} "$@"'
#: Two boot configurations.
BOTH = ("--scenario", "single", "--scenario", "pr25015")


@pytest.fixture
def work(work, machine):
    pretended_engine.furnish(work / "home", body=HOST)
    return work


@pytest.fixture
def stranger(machine):
    """A process that is no engine of ours and has nearly all of the card."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    machine.say(cards=[used(70000)], apps=[app(process.pid, name="train.py", mib=70000)])
    yield process
    process.kill()
    process.wait()


def test_a_run_on_a_taken_card_is_unknown_and_names_who_has_it(work, stranger, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_GPU_WAIT", "2")
    done = call("run", "--device", "cuda", "--engine", "0.5.13", *BOTH, "--json", "out.json", code=3)
    scenarios = json.loads((work / "out.json").read_text())["scenarios"]
    assert [one["verdict"] for one in scenarios] == ["UNKNOWN", "UNKNOWN"]
    for one in scenarios:
        assert f"taken by process {stranger.pid} (train.py, 68.4 GiB), which is no engine of ours" in one["reasons"][0]
    assert int(scenarios[0]["reasons"][0].split(" after ")[1].split(" s:")[0]) >= 2
    assert "waiting for a GPU lease" in done.stdout
    assert "choose another card:  export CUDA_VISIBLE_DEVICES=UUID" in done.stdout


def test_a_matrix_on_a_taken_card_is_unknown_in_every_cell(work, stranger, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_GPU_WAIT", "0")
    done = call("matrix", "--device", "cuda", "--engines", "0.5.12.post1,0.5.13", "--cases", "pr25015", code=3)
    assert "verdict UNKNOWN: 2 cells, 2 UNKNOWN" in done.stdout


@pytest.mark.parametrize(
    "command",
    [["run"], ["matrix", "--engines", "0.5.13", "--cases", "pr25015"], ["mutants"]],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize(
    ("answer", "options", "said"),
    [
        ({"cards": []}, ["--device", "cuda"], "--device cuda: nvidia-smi lists no GPU"),
        ({}, ["--device", "cuda", "--gpu-share", "200"], "--gpu-share 200: no GPU here has a share of that size"),
        ({}, ["--gpu-share", "4"], "--gpu-share 4: there is no GPU on cpu"),
    ],
    ids=["no-card", "no-such-share", "cpu"],
)
def test_what_no_card_here_can_give_is_a_usage_error(work, machine, command, answer, options, said):
    machine.say(**answer)
    done = call(*command, *options)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert said in done.stderr
    assert not (work / "runs").exists()
