"""The catalogue of mutants holds together, and every check has something in it that it must notice."""

import tomllib
from pathlib import Path

import pytest

from cases.exercises import EXERCISES
from harness.both_sides import faults
from harness.both_sides.faults import FAULTS, NEEDS, SITES, TEXTS
from harness.checks import CHECKS
from harness.contract.types import Kind, Phase
from harness.engine_side.mutants.fault_acts_idle import IDLE_ACTS
from harness.engine_side.mutants.fault_sites import FORWARD_ACTS
from harness.engine_side.mutants.fault_wraps import ACTS
from harness.search.mutants import by_engine, with_fault
from harness.search.scoreboard import EXCUSED, UNDRIVABLE

FAMILIES = {
    "eagle3",
    *("positions", "tail", "hidden", "proposals", "tree", "accept", "cache", "requests", "forwards", "idle", "layers"),
    "handoff",
    "sampled",
}
DRIVABLE = [fault for fault in FAULTS.values() if fault.needs not in UNDRIVABLE]


def test_there_are_forty_and_every_family_has_some():
    assert len(DRIVABLE) >= 40
    assert {fault.family for fault in FAULTS.values()} == FAMILIES


def test_no_id_is_used_in_two_families():
    text = Path(faults.__file__).with_suffix(".toml").read_text()
    assert len(FAULTS) == sum(len(entries) for entries in tomllib.loads(text).values())


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.id)
def test_every_word_of_an_entry_means_something(fault):
    assert fault.kinds, "a mutant must say what shows it"
    assert set(fault.kinds) <= set(Kind)
    assert set(fault.phases) <= set(Phase)
    assert fault.needs in NEEDS
    assert fault.site in SITES
    assert fault.text in TEXTS
    assert fault.args.get("at", "all") in ("all", "inner", "last", "border", "retracted", "last-request")
    assert len(fault.what.split()) >= 4


@pytest.mark.parametrize("fault", DRIVABLE, ids=lambda fault: fault.id)
def test_every_mutant_that_can_run_has_an_act_and_an_exercise(fault):
    assert fault.act in (*ACTS, *FORWARD_ACTS, *IDLE_ACTS)
    assert EXERCISES[fault.needs]


def test_no_act_is_without_a_mutant():
    assert {*ACTS, *FORWARD_ACTS, *IDLE_ACTS} == {fault.act for fault in DRIVABLE}


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.id)
def test_every_check_has_a_mutant_that_could_show_it(check):
    asked = {kind for fault in DRIVABLE for kind in fault.kinds}
    assert check.id in EXCUSED or check.kinds & asked


def test_excuses_name_checks_that_exist():
    assert set(EXCUSED) <= set(CHECKS)


def test_exercises_of_one_need_share_an_engine():
    assert all(len({one.boot_key() for one in listed}) == 1 for listed in EXERCISES.values())


def test_mutants_are_grouped_so_that_nine_boots_serve_all():
    drivable = by_engine(DRIVABLE)
    assert len(drivable) == 9
    assert sorted(fault.id for group in drivable for fault in group) == sorted(fault.id for fault in DRIVABLE)


def test_mutated_scenario_differs_from_the_sound_one_in_one_op_and_its_name():
    sound, fault = EXERCISES["chunk"][0], FAULTS["tail-chunk-border"]
    mutated = with_fault(sound, fault, first=3)
    assert mutated.script[1:] == sound.script
    assert (mutated.script[0].kind, mutated.script[0].name, mutated.script[0].count) == ("fault", fault.id, 3)
    assert mutated.boot_key() == sound.boot_key()
    assert mutated.id != sound.id
    assert mutated.model_copy(update={"script": sound.script, "name": sound.name}) == sound
