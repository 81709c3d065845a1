"""F-003 is taken for granted only by name, is reported, and hides nothing else. No engine here."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cases.catalogue import read_scenario
from cases.checkpoints import make
from harness.checks.judge import judge
from harness.contract.types import Kind, Outcome
from harness.defects import departures
from harness.driving.oracle import Oracle
from reference.model import Target
from reference.pairs import load_head
from reference.session import ReferenceSession

ROOT = Path(__file__).parents[2]
REPRODUCER = read_scenario(ROOT / "cases" / "scenarios" / "tree-slot-cache.json")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make("eagle-tiny", tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def own_slots(pair):
    """What an engine with this defect does: the reference's own run, beams seeing their slots."""
    target = Target.load(pair.target)
    session = ReferenceSession(target, load_head(pair.draft, target), REPRODUCER.spec, departures=departures(["F-003"]))
    return session.speculate(REPRODUCER.requests[0], scenario_id=REPRODUCER.id)


def judged(pair, trace, *assumed):
    reference = Oracle(target=pair.target, draft=pair.draft, assumed=assumed).answer(REPRODUCER, trace)
    verdict, divergences = judge(REPRODUCER, trace, reference)
    return verdict, {found.kind for found in divergences}


def test_it_is_a_finding_unless_it_is_named(pair, own_slots):
    verdict, kinds = judged(pair, own_slots)
    assert Kind.NUMERIC in kinds
    assert not any(reason.startswith("assumed") for reason in verdict.reasons)
    verdict, kinds = judged(pair, own_slots, "F-003")
    assert not kinds
    assert any(reason.startswith("assumed: F-003, ") for reason in verdict.reasons)


def test_an_engine_without_it_is_then_a_finding_too(pair):
    target = Target.load(pair.target)
    sound = ReferenceSession(target, load_head(pair.draft, target), REPRODUCER.spec).speculate(REPRODUCER.requests[0])
    assert judged(pair, sound)[1] == set()
    assert Kind.NUMERIC in judged(pair, sound, "F-003")[1]


def test_another_defect_beside_it_is_still_found(pair, own_slots):
    rows = own_slots.rows
    at = int(np.flatnonzero((rows.strings["phase"] == "DRAFT") & (rows.ints["step"] == 1))[0])
    rows.ints["position"][at] += 1
    try:
        verdict, kinds = judged(pair, own_slots, "F-003")
    finally:
        rows.ints["position"][at] -= 1
    assert verdict.outcome is Outcome.FAIL
    assert Kind.POSITION in kinds
