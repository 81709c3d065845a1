"""DP attention on the real engine: busy ranks beside idle ones, and how a rank that dies or hangs is reported."""

import os
import signal

import pytest
from packaging.version import Version

from cases.boots import BY_NAME
from cases.families import FAMILIES
from cases.meta.processes import survivors, tree
from harness.contract.types import Kind, Outcome

FAMILY = {scenario.name: scenario for scenario in FAMILIES["dp"].scenarios}
BOOT = FAMILY["uneven-batches"].boot_key()
ASSUMED = BY_NAME["dp"].assumes
STUCK = 4  # both ranks have verified by then


@pytest.fixture
def _since(release):
    if Version(release) < Version("0.5.13"):
        pytest.skip("before 0.5.13 the release's own bugs come first")


@pytest.mark.engine(boot=BOOT)
@pytest.mark.usefixtures("_since")
@pytest.mark.parametrize("name", ["uneven-batches", "finish-together", "abort-leaves-idle", "idle-inside-chunks"])
def test_neighbours_change_nothing(engines, release, monkeypatch, name):
    monkeypatch.setattr(engines, "assumed", ASSUMED)
    outcome = engines(FAMILY[name], engine=release)
    assert outcome.passed, outcome.verdict.reasons
    assert all(outcome.verdict.coverage.get(want) for want in FAMILY[name].wants)
    if any("idle" in want for want in FAMILY[name].wants):
        assert outcome.verdict.compared["idle_states"] > 0
    assert outcome.verdict.compared["token_counts"] > 0


@pytest.mark.engine(boot=BOOT, ends_it=True)
@pytest.mark.usefixtures("_since")
def test_rank_that_hangs_is_named_with_its_last_forward_and_every_process_ends(engines, release, monkeypatch):
    monkeypatch.setattr(engines, "assumed", ASSUMED)
    # SIGSTOP stands for a collective that nobody else enters: what distinguishes the two is disabled.
    monkeypatch.setattr("harness.engines.exits.stopped", lambda _pid: False)
    scenario = FAMILY["abort-leaves-idle"]
    engine = engines.use(engines.launch(scenario, engine=release))
    stuck = next(rank for rank in engine.handshakes if rank["dp_rank"] == 1)
    processes = tree(engine.process.pid)

    def stop(scheduler_step, _state):
        if scheduler_step == STUCK:
            monkeypatch.setattr("harness.engines.side.STEP_SECONDS", 3.0)  # not before: the first steps are slow
            os.kill(stuck["pid"], signal.SIGSTOP)

    outcome = engines(scenario, engine=release, fresh=True, on_step=stop)
    assert outcome.verdict.root_kinds == (Kind.HANG,)
    first = outcome.first
    assert (first.key.dp_rank, str(first.key.phase)) == (1, "EXTEND")
    assert first.round >= STUCK - 1
    assert survivors(processes) == []


@pytest.mark.engine(boot=BOOT, ends_it=True)
@pytest.mark.usefixtures("_since")
def test_idle_rank_that_dies_is_named_with_its_round_and_place(engines, release):
    outcome = engines(FAMILY["other-rank-idle"], engine=release, fresh=True)
    assert outcome.verdict.outcome is Outcome.FAIL
    first = outcome.first
    assert (first.kind, first.key.dp_rank, first.round) == (Kind.CRASH, 1, 1)
    assert "init_forward_metadata" in first.signature
