"""An engine that a run gives up is ended before the next one boots, whatever the run gave it up for."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from cases.meta import results
from harness.contract.types import Outcome
from harness.driving import plan as plans
from harness.driving import pool, runner
from harness.engines.envs import EngineEnv
from harness.engines.errors import EngineError, EngineNotClean

LAUNCH = SimpleNamespace(beside=None, boot={}, python="python", pythonpath=(), ranks=1)
SCENARIOS = tuple(results.named(name) for name in ("single", "together", "joined"))


@pytest.fixture
def engines(monkeypatch):
    """Every engine that was started; one that starts while another lives is reported."""
    started = []

    class Pretended:
        handshakes = ({"release": "0.5.23", "device": "cpu"},)
        boots_seconds = 0.0
        process = SimpleNamespace(poll=lambda: None)

        def __init__(self, *, launch, log):
            assert all(one.closed for one in started), "two engines at a time"
            self.closed = False
            started.append(self)

        def boot(self, *, progress):
            pass

        def close(self):
            self.closed = True

    monkeypatch.setattr(pool, "Engine", Pretended)
    monkeypatch.setattr(pool, "can_fork", lambda _launch: False)
    monkeypatch.setattr(plans, "build_launch", lambda **_options: LAUNCH)
    monkeypatch.setattr(runner, "load_oracle", lambda *_folders: SimpleNamespace(peak_mib=0))
    return started


def plan(root):
    env = EngineEnv(version="0.5.23", python=Path("python"), pythonpath=(), torch="2.13.0", ready=True)
    pairs = {one.checkpoint: (root, root) for one in SCENARIOS}
    return plans.Plan(env=env, setup=plans.Setup(release="0.5.23"), scenarios=SCENARIOS, pairs=pairs, root=root)


@pytest.mark.parametrize("why", [EngineError("the engine refused it"), EngineNotClean("it still holds slots")])
def test_an_engine_that_is_given_up_is_ended_first(engines, monkeypatch, tmp_path, why):
    def drive(*_arguments, **_options):
        raise why

    monkeypatch.setattr(pool, "drive", drive)
    done = runner.run(plan(tmp_path))
    assert [one.verdict.outcome for one in done.results] == [Outcome.UNKNOWN] * len(SCENARIOS)
    assert len(engines) >= len(SCENARIOS)
    assert all(one.closed for one in engines)
