"""States that draft steps hand on, in runs recorded on a real GPU: exact as they are, and shown when one is touched."""

from dataclasses import replace

import numpy as np
import pytest

from cases.meta.recorded import gpu_run
from harness.archive.store import read_case
from harness.checks.evidence import gather
from harness.checks.judge import judge
from harness.checks.registry import CHECKS, run_check

CELLS = [("pr25015", "0.5.13", "graphs", False), ("pr25015", "0.5.17", "eager", False)]


@pytest.fixture(params=CELLS, ids=lambda cell: "-".join(map(str, cell[:3])))
def case(request):
    return read_case(gpu_run(*request.param))


def asked(case, trace):
    return run_check(CHECKS["states"], gather(case.scenario, trace, None))


def touched(trace, change):
    """The trace with one state that a draft step read changed, and the step's row."""
    reads = trace.tensors["hidden_in.DRAFT"].copy()
    change(reads)
    return replace(trace, tensors={**trace.tensors, "hidden_in.DRAFT": reads})


def test_what_was_left_arrives_bit_by_bit(case):
    result = asked(case, case.engine)
    assert result.divergences == []
    assert result.unknown == []
    assert (case.engine.rows.strings["phase"] == "DRAFT").sum() >= 10


def test_a_passage_through_a_coarser_dtype_is_shown_though_a_budget_lets_it_pass(case):
    def coarser(reads):
        wide = reads.astype(np.float32).view(np.uint32)
        reads[:] = ((wide + 0x8000) & 0xFFFF0000).view(np.float32)

    trace = touched(case.engine, coarser)
    found = asked(case, trace).divergences
    assert {one.key.phase for one in found} == {"DRAFT"}
    assert len(found) == (case.engine.rows.strings["phase"] == "DRAFT").sum()
    verdict, divergences = judge(case.scenario, trace, case.reference)
    assert {one.check for one in divergences if one.kind == "NUMERIC"} == {"states"}
    assert verdict.root_kinds == ("NUMERIC",)


def test_one_value_of_one_step_is_named_with_its_place(case):
    def nudge(reads):
        reads[3, 5] = np.nextafter(reads[3, 5], np.float32(np.inf))

    (found,) = asked(case, touched(case.engine, nudge)).divergences
    assert found.observed["at"] == 5
    assert found.observed["mismatched"] == 1
    assert found.signature == "NUMERIC:states:DRAFT:hidden_in-off"


def test_float32_is_left_to_the_budget(case):
    def nudge(reads):
        reads += 1

    wide = replace(touched(case.engine, nudge), header={**case.engine.header, "dtype": "float32"})
    assert asked(case, wide).divergences == []


def test_a_trace_without_draft_steps_says_nothing(case):
    tensors = {name: value for name, value in case.engine.tensors.items() if name != "hidden_in.DRAFT"}
    result = asked(case, replace(case.engine, tensors=tensors))
    assert (result.divergences, result.unknown) == ([], [])
