"""What we add to the engine to see it, or to run it on a CPU, does not change what it computes."""

import numpy as np
import pytest

from cases.families import FAMILIES
from cases.programs import CHUNKED_BATCH, DEFAULT
from harness.contract.rows import INT_COLUMNS
from harness.contract.types import Outcome

WATCHED = [DEFAULT[name] for name in ("single", "shared-chunk-budget", "shared-prefix")]
BOOT = WATCHED[0].boot_key()
RANKS = next(one for one in FAMILIES["tp"].scenarios if one.name == "tp-four-together")


def _texts(trace):
    return {end.rid: (end.reason, end.output_ids) for end in trace.ends}


def _same_integers(ours, own):
    for name in (*INT_COLUMNS, "phase", "rid"):
        left, right = ({**rows.ints, **rows.strings}[name] for rows in (ours, own))
        assert np.array_equal(left, right), name
    for name in ("chosen_ids", "slots_read"):
        for left, right in zip(ours.lists[name], own.lists[name], strict=True):
            assert np.array_equal(left, right)


@pytest.mark.engine(boot=BOOT)
@pytest.mark.parametrize("watched", WATCHED, ids=lambda scenario: scenario.name)
def test_texts_are_the_same_with_recording_off(engines, drive_scenario, watched):
    silent = engines.drive(engines.launch(watched), watched, record=False)
    assert len(silent.rows) == 0
    assert _texts(silent) == _texts(drive_scenario(watched).trace)


@pytest.mark.engine(boot=BOOT, ends_it=True)
def test_texts_are_the_same_without_any_probe(engines, drive_scenario):
    traced = [_texts(drive_scenario(scenario).trace) for scenario in WATCHED]
    bare = [_texts(engines.drive(engines.launch(scenario, probe=False), scenario)) for scenario in WATCHED]
    assert bare == traced


@pytest.mark.engine(boot=BOOT, ends_it=True)
def test_sglangs_own_kernels_and_way_of_starting_give_the_same_integers_as_ours(engines, drive_scenario, monkeypatch):
    """One boot for both: its attention is SGLang's own, and so is how its processes come to be."""
    if engines.device != "cpu":
        pytest.skip(f"there is no replacement kernel for attention on {engines.device}")
    ours = drive_scenario(CHUNKED_BATCH)
    assert "copied processes" in ours.trace.header["flags"]
    monkeypatch.setattr(engines, "copies", False)
    own = drive_scenario(CHUNKED_BATCH, cpu_attention="interpreted")
    assert "copied processes" not in own.trace.header["flags"]
    assert own.trace.header["models"] == ours.trace.header["models"]  # the one without, the other among all of SGLang's
    assert "attention" not in {entry["subject"] for entry in own.trace.header["replaced"]}
    assert own.verdict.outcome is ours.verdict.outcome is Outcome.PASS
    _same_integers(ours.trace.rows, own.trace.rows)
    assert own.verdict.compared["slots_read"] == ours.verdict.compared["slots_read"] > 0


@pytest.mark.engine(boot=RANKS.boot_key(), ends_it=True)
def test_ranks_give_the_same_integers_whether_they_are_forked_or_started_anew(engines, drive_scenario, monkeypatch):
    ours = drive_scenario(RANKS)
    engines.close()
    monkeypatch.setattr(engines, "copies", False)
    own = drive_scenario(RANKS, fresh=True)
    assert [("copied processes" in one.trace.header["flags"]) for one in (ours, own)] == [True, False]
    assert own.verdict.outcome is ours.verdict.outcome is Outcome.PASS
    _same_integers(ours.trace.rows, own.trace.rows)
