"""A known deviation is taken for granted only by name, is told, and hides nothing else. No engine here."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cases.catalogue import read_scenario
from cases.checkpoints import make
from cases.families import FAMILIES
from harness.checks.judge import judge
from harness.contract.deviations import DEVIATIONS, UnknownDeviation, checked, in_vain, notes
from harness.contract.types import EngineConfig, Kind, Outcome, SpecConfig
from harness.defects import departures
from harness.driving.oracle import Oracle
from reference.model import Target
from reference.pairs import load_head
from reference.session import ReferenceSession

ROOT = Path(__file__).parents[2]
SPECIMEN = read_scenario(ROOT / "cases" / "scenarios" / "tree-slot-cache.json")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make("eagle-tiny", tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def deviating(pair):
    """What an engine with this deviation does: the reference's own run, beams seeing their slots."""
    target = Target.load(pair.target)
    session = ReferenceSession(target, load_head(pair.draft, target), SPECIMEN.spec, departures=departures(["F-003"]))
    return session.speculate(SPECIMEN.requests[0], scenario_id=SPECIMEN.id)


def judged(pair, trace, *assumed):
    reference = Oracle(target=pair.target, draft=pair.draft, assumed=assumed).answer(SPECIMEN, trace)
    verdict, divergences = judge(SPECIMEN, trace, reference)
    return verdict, {found.kind for found in divergences}


def test_deviation_is_a_finding_unless_it_is_named(pair, deviating):
    verdict, kinds = judged(pair, deviating)
    assert Kind.NUMERIC in kinds
    assert not any(reason.startswith("assumed") for reason in verdict.reasons)
    verdict, kinds = judged(pair, deviating, "F-003")
    assert not kinds
    assert any(reason.startswith("assumed: F-003, ") for reason in verdict.reasons)


def test_engine_that_no_longer_deviates_is_a_finding_too(pair):
    target = Target.load(pair.target)
    sound = ReferenceSession(target, load_head(pair.draft, target), SPECIMEN.spec).speculate(SPECIMEN.requests[0])
    assert judged(pair, sound)[1] == set()
    assert Kind.NUMERIC in judged(pair, sound, "F-003")[1]


def test_another_fault_beside_it_is_still_found(pair, deviating):
    rows = deviating.rows
    at = int(np.flatnonzero((rows.strings["phase"] == "DRAFT") & (rows.ints["step"] == 1))[0])
    rows.ints["position"][at] += 1
    try:
        verdict, kinds = judged(pair, deviating, "F-003")
    finally:
        rows.ints["position"][at] -= 1
    assert verdict.outcome is Outcome.FAIL
    assert Kind.POSITION in kinds


def test_nothing_is_said_where_it_cannot_show():
    assert notes({"assumed": ["F-003"]}, SPECIMEN.spec, dp=1)
    assert notes({"assumed": ["F-003"]}, SpecConfig(k=3, t=1, n=4), dp=1) == []
    assert notes({"assumed": ["F-003"]}, SpecConfig(k=2, t=2, n=4), dp=1) == []
    assert notes({}, SPECIMEN.spec, dp=1) == []


def test_nothing_is_said_of_idle_ranks_where_there_is_one_rank():
    assert notes({"assumed": ["F-007"]}, SPECIMEN.spec, dp=2)
    assert notes({"assumed": ["F-007"]}, SPECIMEN.spec, dp=1) == []


def test_ids_are_checked_and_the_nearest_is_named():
    assert checked(["F-003", "F-003"]) == ("F-003",)
    with pytest.raises(UnknownDeviation, match="unknown deviation 'F-03'; did you mean 'F-003'"):
        checked(["F-03"])


ONE, RANKS, IN_GRAPHS = EngineConfig(), EngineConfig(dp=2, tp=2), EngineConfig(graphs=True)


def test_a_stand_in_that_only_a_cpu_has_is_assumed_in_vain_on_a_gpu_and_never_told_as_assumed():
    """There SGLang runs as it is: a verdict that says `assumed` would promise what nobody does."""
    layers = SpecConfig(algorithm="MTP", k=3, t=1, n=4)
    for name, spec, engine, release in (
        ("F-007", SpecConfig(), RANKS, "0.5.13"),
        ("F-008", SpecConfig(), RANKS, "0.5.13"),
        ("F-011", layers, ONE, "0.5.13"),
    ):
        assert in_vain([name], [(spec, engine)], release=release) == []
        (vain,) = in_vain([name], [(spec, engine)], release=release, device="cuda")
        assert "a CPU, where its stand-in is" in vain
        told = {"dp": engine.dp, "release": release}
        assert notes({"assumed": [name]}, spec, **told)
        assert notes({"assumed": [name]}, spec, **told, device="cuda") == []


def test_graphs_and_the_prefix_cache_are_asked_too():
    layers, bare = SpecConfig(algorithm="MTP", k=3, t=1, n=4), EngineConfig(prefix_cache=False)
    assert in_vain(["F-020"], [(layers, IN_GRAPHS)], device="cuda", release="0.5.13") == []
    assert "CUDA graphs" in in_vain(["F-020"], [(layers, ONE)], release="0.5.13")[0]
    assert in_vain(["F-012"], [(layers, ONE)]) == []
    assert "a prefix cache" in in_vain(["F-012"], [(layers, bare)])[0]


def test_what_none_of_the_scenarios_can_show_is_assumed_in_vain():
    """One line each, which says what it would take; a deviation that one of them can show is not mentioned."""
    chain, layers = SpecConfig(k=3, t=1, n=4), SpecConfig(algorithm="MTP", k=3, t=1, n=4)
    assert in_vain(["F-007", "F-010"], [(chain, RANKS), (layers, ONE)]) == []
    (slot,) = in_vain(["F-003"], [(chain, ONE), (SpecConfig(k=2, t=2, n=6), ONE)])
    assert slot.startswith("F-003 is assumed in vain")
    assert "it needs k 3 or more, t 2 or more" in slot
    assert ["2 DP ranks" in line for line in in_vain(["F-007", "F-010"], [(chain, ONE)])] == [True, False]


def test_every_deviation_is_written_up():
    text = (ROOT / "docs" / "findings.md").read_text()
    assert all(f"## {one} " in text for one in DEVIATIONS)


@pytest.mark.parametrize(
    "boot", [boot for family in FAMILIES.values() for boot in family.boots], ids=lambda boot: boot.name
)
def test_boots_name_the_deviations_that_show_in_them(boot):
    about = {"dp": boot.engine.dp, "graphs": boot.engine.graphs, "cache": boot.engine.prefix_cache}
    shown = (one.id for one in DEVIATIONS.values() if one.shows_in(boot.spec, **about))
    assert boot.assumes == tuple(shown)
