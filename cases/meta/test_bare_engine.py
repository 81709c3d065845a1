"""SGLang alone: what its program is given, and where its threads were when it had to be stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cases.catalogue import read_scenario
from harness.engines import bare
from harness.engines.process import Launch

SCENARIO = read_scenario(Path(__file__).parents[1] / "scenarios" / "gpu-eager-then-graph.json")
STUCK = """
import threading, time
def waits_for_ever(): time.sleep(600)
print("booted", flush=True)
waits_for_ever()
"""


def launch(device: str) -> Launch:
    boot = {"device": device, "environment": {}, "arguments": {"pp_size": 2}, "optional_arguments": {}, "lease": None}
    return Launch(python=Path(sys.executable), pythonpath=(), boot=boot, ranks=1)


def test_what_gives_no_answer_says_where_its_threads_are(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(STUCK)
    monkeypatch.setattr(bare, "PROGRAM", program)
    with bare.started(launch("cuda"), SCENARIO, folder=tmp_path) as running:
        while "booted" not in running.log.read_text():
            pass
        found = running.result(0.1)
    assert (found.booted, found.texts, found.hung) == (True, None, True)
    assert "in waits_for_ever" in (tmp_path / "bare.log").read_text()


@pytest.mark.parametrize(
    ("device", "indexer", "replaced"), [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)]
)
def test_kernels_are_replaced_on_a_cpu_and_beside_a_sparse_indexer(device, indexer, replaced, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("")
    monkeypatch.setattr(bare, "PROGRAM", program)
    own = launch(device)
    own.boot.update({"indexer": True} if indexer else {})
    bare.run_bare(own, SCENARIO, folder=tmp_path, seconds=60, images=[None, [[1.0, 2.0]]])
    given = json.loads((tmp_path / "bare.json").read_text())
    assert given["replaced"] == (own.boot if replaced else None)
    assert (given["waves"], given["images"]) == ([5, 1], [None, [[1.0, 2.0]]])
