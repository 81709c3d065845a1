"""What a replay without a probe says, and which prompts SGLang alone gets together."""

from dataclasses import replace
from pathlib import Path

import pytest

from cases.catalogue import read_scenario
from harness.archive.store import StoredScenario
from harness.cli.replay_unwatched import _answer, _compared, trouble
from harness.contract.trace import Event, RequestEnd, RowBuilder, Trace
from harness.engines.bare import _read, waves

SCENARIOS = Path(__file__).parents[1] / "scenarios"
QUIET = Trace(side="engine", scenario_id="x", header={}, rows=RowBuilder().build())


def test_trouble_is_what_the_crash_said_first_and_where():
    crash = {"error": "CUDA error: an illegal memory access\nmore", "site": "a.py:f", "round": 5}
    trace = replace(QUIET, events=(Event(name="crash", scheduler_step=7, dp_rank=0, data=crash),))
    assert trouble(trace) == "CUDA error: an illegal memory access at a.py:f, round 5, step 7"
    assert trouble(QUIET) == ""


def test_flush_parts_the_prompts_of_a_bare_engine():
    assert waves(read_scenario(SCENARIOS / "gpu-eager-then-graph.json")) == [5, 1]
    assert waves(read_scenario(SCENARIOS / "gpu-topk8-flashinfer.json")) == [4]


def test_log_of_a_bare_engine_is_read():
    said = _read(["booted", '{"release": "0.5.13", "texts": [[1, 2]], "verifies": [3]}'])
    assert (said.texts, said.verifies) == (((1, 2),), (3,))
    ended = _read(["booted", "RuntimeError: CUDA error: oh", "stopped after 5 s"])
    assert (ended.booted, ended.texts) == (True, None)
    assert ended.why == ("RuntimeError: CUDA error: oh", "stopped after 5 s")


@pytest.mark.parametrize(
    ("signature", "ended", "word"),
    [
        ("CRASH:x:DRAFT:y", "oh", "FAILED"),
        ("CRASH:x:DRAFT:y", "", "FIXED"),
        ("TOKEN:x:DRAFT:y", "oh", "FAILED"),
        ("TOKEN:x:DRAFT:y", "", "ERROR"),
    ],
)
def test_without_a_trace_only_ends_can_be_judged(signature, ended, word):
    assert _answer(signature, "here", ended, "the texts are those stored").word == word


def test_texts_are_compared_with_those_stored():
    ends = (
        RequestEnd(rid="a", scheduler_step=1, reason="length", output_ids=(1, 2)),
        RequestEnd(rid="b", scheduler_step=1, reason="abort", output_ids=(1,)),
    )
    scenario = read_scenario(SCENARIOS / "gpu-topk8-flashinfer.json")
    engine = replace(QUIET, ends=ends)
    stored = StoredScenario(folder=Path(), scenario=scenario, engine=engine, reference=None, findings=(), verdict=None)
    assert _compared(stored, {"a": (1, 2), "b": (9,)}) == "the texts are those stored"
    assert _compared(stored, {"a": (1, 3)}) == "other texts than stored: a"
