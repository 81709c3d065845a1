"""Wrappers lie in the right order around what they wrap, and a mutant's own failure is not taken for the engine's."""

import types
from types import SimpleNamespace

import pytest
import torch

from harness.both_sides.faults import FAULTS
from harness.engine_side.hooks import Ledger
from harness.engine_side.mutants import fault_wraps
from harness.engine_side.mutants.fault_wraps import Armed, FaultBroken, Faults


def module():
    made = types.ModuleType("pretended")
    made.run = lambda: ["bare"]
    return made


def tagged(name):
    return lambda original: lambda: [*original(), name]


def test_later_wrappers_lie_outside_unless_asked_to_lie_inside():
    place, ledger = module(), Ledger()
    ledger.wrap(place, "run", tagged("probe"))
    ledger.wrap(place, "run", tagged("outside"))
    ledger.wrap(place, "run", tagged("inside"), innermost=True)
    assert place.run() == ["bare", "inside", "probe", "outside"]


def test_what_is_not_there_is_noted_and_nothing_is_wrapped():
    place, ledger = module(), Ledger()
    assert not ledger.wrap(place, "Worker.draft", tagged("x"), innermost=True)
    assert ledger.missing == ["pretended:Worker.draft"]
    assert place.run() == ["bare"]


def faults(name, *, first=1, batches=1, active=True, within_round=True):
    """Mutants of a process in which nothing was wrapped."""
    made = object.__new__(Faults)
    made.recorder = SimpleNamespace(active=active, round=object() if within_round else None)
    made.armed, made.batches, made.outputs, made._page = [Armed(FAULTS[name], first)], batches, {}, 1
    return made


POSITIONS = {"positions": torch.tensor([4, 5])}


def late(made, *, phase="DRAFT", site="inputs"):
    shares = [fault_wraps.Share("a", 0, 2, 4, True, 0)]
    return made.apply(site, POSITIONS, phase=phase, shares=shares)


def test_armed_mutant_acts_and_is_counted():
    made = faults("draft-position-late")
    assert late(made)["positions"].tolist() == [5, 6]
    assert made.fired() == {"draft-position-late": 1}


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, {"phase": "EXTEND"}),
        ({}, {"site": "choices"}),
        ({"first": 3, "batches": 2}, {}),
        ({"active": False}, {}),
    ],
)
def test_mutant_does_not_act_elsewhere_or_too_early(options, place):
    made = faults("draft-position-late", **options)
    assert late(made, **place) == {}
    assert made.fired() == {"draft-position-late": 0}


def test_change_that_changes_nothing_is_not_counted():
    made = faults("draft-position-neighbour")
    assert late(made) == {}
    assert made.fired() == {"draft-position-neighbour": 0}


def test_failure_of_a_mutant_is_our_own():
    with pytest.raises(FaultBroken, match="mutant hidden-zeroed: KeyError"):
        late(faults("hidden-zeroed"))


def test_disarmed_engine_is_sound_again():
    made = faults("draft-position-late")
    made.disarm()
    assert late(made) == {}
    assert made.fired() == {}


def test_refused_where_the_release_lacks_a_place():
    made = faults("draft-position-late")
    made._missing = ["pretended:Worker.draft"]
    with pytest.raises(LookupError, match=r"nothing to wrap at pretended:Worker\.draft"):
        made.arm("draft-position-late", first=1)
