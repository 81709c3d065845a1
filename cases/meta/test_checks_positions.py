"""Check `positions`: those of every phase, and the parents of a tree. Without a reference."""

import pytest

from cases.meta import handmade
from cases.meta.judged import roots


@pytest.mark.parametrize("phase", ["PREFILL", "DRAFT_PREFILL", "DRAFT", "VERIFY", "EXTEND"])
@pytest.mark.parametrize(("offset", "hint"), [(1, "one-ahead"), (-1, "one-behind"), (5, "ahead"), (-3, "behind")])
def test_shifted_position_is_found_in_every_phase(sound, phase, offset, hint):
    scenario, engine = sound
    engine.rows.ints["position"][handmade.find(engine, phase=phase, nth=4)] += offset
    assert roots(scenario, engine) == {("POSITION", "positions", phase, hint): 1}


def test_siblings_of_a_tree_share_their_position():
    scenario = handmade.scenario(t=2)
    engine, _ = handmade.build(scenario)
    second_child = handmade.find(engine, phase="VERIFY", slot=2)
    engine.rows.ints["position"][second_child] += 1  # as if nodes were numbered, not nested
    assert list(roots(scenario, engine)) == [("POSITION", "positions", "VERIFY", "one-ahead")]


@pytest.mark.parametrize(
    ("slot", "parent", "hint"),
    [(0, 2, "root-has-parent"), (2, -1, "second-root"), (2, 99, "no-such-node"), (2, 2, "no-way-to-root")],
)
def test_broken_tree_is_named(sound, slot, parent, hint):
    scenario, engine = sound
    engine.rows.ints["parent"][handmade.find(engine, phase="VERIFY", slot=slot)] = parent
    assert ("PARENT", "positions", "VERIFY", hint) in roots(scenario, engine)
