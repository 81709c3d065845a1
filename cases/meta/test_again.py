"""What of a soak is run over and over, and which prompts a bare engine gets together."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.again import chosen, trouble, turns
from benchmarks.gpu_bare import waves
from cases.catalogue import read_scenario
from harness.contract.trace import Event, RowBuilder, Trace
from harness.contract.types import Op, RequestSpec, Scenario

SCENARIOS = Path(__file__).parents[1] / "scenarios"


def named(name):
    return Scenario(
        name=name,
        requests=(RequestSpec(rid="a", prompt=(1,), max_new_tokens=1),),
        script=(Op(kind="submit", rids=("a",)), Op(kind="drain")),
    )


QUIET = Trace(side="engine", scenario_id="x", header={}, rows=RowBuilder().build())
FOUR = [named(name) for name in ("one", "two", "three", "four")]


def test_the_numbers_name_scenarios_in_the_order_they_are_given():
    assert [one.name for one in chosen(FOUR, "3,1")] == ["four", "two"]
    assert chosen(FOUR, None) == FOUR


@pytest.mark.parametrize("only", ["4", "-1", "0,9"])
def test_a_number_that_is_not_there_is_named_with_those_that_are(only):
    with pytest.raises(ValueError, match=r"--only -?\d: there are scenarios 0 to 3; raise --count"):
        chosen(FOUR, only)


def test_rounds_come_in_order_and_end_with_the_clock():
    later = time.monotonic() + 60
    assert [(number, one.name) for number, one in turns(FOUR[:2], times=2, until=later)] == [
        (0, "one"),
        (0, "two"),
        (1, "one"),
        (1, "two"),
    ]
    assert list(turns(FOUR, times=2, until=time.monotonic() - 1)) == []


def test_trouble_is_what_the_crash_said_first_and_where():
    crash = {"error": "CUDA error: an illegal memory access\nmore", "site": "a.py:f", "round": 5}
    trace = replace(QUIET, events=(Event(name="crash", tick=7, dp_rank=0, data=crash),))
    assert trouble(trace) == "CUDA error: an illegal memory access at a.py:f, round 5, tick 7"
    assert trouble(QUIET) is None


def test_a_flush_parts_the_prompts_of_a_bare_engine():
    assert waves(read_scenario(SCENARIOS / "gpu-eager-then-graph.json")) == [5, 1]
    assert waves(read_scenario(SCENARIOS / "gpu-topk8-flashinfer.json")) == [4]
