"""Booting every release once: what each said, and what is reported when one does not run. The engines are scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cases import checkpoints
from cases.meta.pretended_pip import quiet
from harness.archive.faults import WriteError
from harness.both_sides import leases
from harness.engines import envs
from harness.engines.dependencies import EnvError
from harness.engines.envs import EngineEnv
from harness.machines import warm

ANSWER = {
    "release": "0.5.13",
    "texts": [[1] * 24, [2] * 24],
    "verifies": [9, 11],
    "took": {"import": 16.2, "boot": 35.0},
}


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """interpreter(body) stands in for the Python of every release; $3 is the file with what it was asked for."""
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    asked = leases.Request(share=1024, wait=60.0, folder=str(tmp_path), visible=None)
    monkeypatch.setattr(leases, "request", lambda: asked)
    path = tmp_path / "python"

    def state(version: str) -> EngineEnv:
        return EngineEnv(version=version, python=path, pythonpath=(tmp_path / "part",), torch="2.11.0", ready=True)

    monkeypatch.setattr(envs, "state", state)

    def make(body: str) -> None:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return make


def test_each_variant_of_each_release_says_what_it_drafted(interpreter, tmp_path):
    interpreter(f"cp \"$3\" {tmp_path}/asked-$$\necho loading\necho '{json.dumps(ANSWER)}'")
    reported: list[str] = []
    answers = warm.warm(["0.5.11", "0.5.13"], progress=reported.append)
    assert [one.texts[0][:1] for one in answers] == [(1,)] * 4
    assert "SGLang 0.5.13 float16 topk 1 graphs: imported in 16 s, booted in 35 s, 48 tokens in 20 rounds" in reported
    asked = [json.loads(path.read_text())["arguments"] for path in tmp_path.glob("asked-*")]
    assert {(one["dtype"], one["speculative_eagle_topk"], one["disable_cuda_graph"]) for one in asked} == {
        ("float16", 1, False),
        ("bfloat16", 4, True),
    }
    ports = [json.loads(path.read_text())["optional"]["port"] for path in tmp_path.glob("asked-*")]
    assert len(set(ports)) == 4  # side by side on one machine
    assert {one["device"] for one in asked} == {"cuda"}


def test_one_that_does_not_run_is_named_with_the_end_of_its_log(interpreter):
    interpreter("echo 'ninja: build stopped'\nexit 1")
    with pytest.raises(EnvError, match="ninja: build stopped") as caught:
        warm.warm(["0.5.13"], progress=quiet)
    assert "SGLang 0.5.13 bfloat16 topk 4 eager" in caught.value.what
    assert Path(caught.value.next_step.split()[-1]).exists()


def test_a_disk_without_room_for_its_log_is_named(interpreter, tmp_path, full_disk):
    interpreter("exit 1")
    checkpoints.make(warm.CHECKPOINT, tmp_path / "home" / "checkpoints")
    (tmp_path / "home" / "logs").symlink_to(full_disk)
    with pytest.raises(WriteError, match=f"the disk is full: cannot write to {tmp_path / 'home' / 'logs'}, "):
        warm.warm(["0.5.13"], progress=quiet)


def test_one_that_hangs_is_given_up_and_ended(interpreter, monkeypatch, tmp_path):
    monkeypatch.setattr(warm, "SECONDS", 0.5)
    interpreter(f"echo $$ >> {tmp_path}/pids\nexec sleep 900")
    with pytest.raises(EnvError):
        warm.warm(["0.5.13"], progress=quiet)
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
