"""A reproducer of a test session or of a night says how its engine was started, and is replayed and bisected so."""

from types import SimpleNamespace

import pytest

from cases.meta import results
from cases.meta.command_line import call
from harness.archive.store import read_reproducer, started_with
from harness.cli import bisect_runs, prepare
from harness.contract.usage import UsageError
from harness.driving.live import LiveEngines

SCENARIO = results.named("single")


@pytest.fixture
def reproducer(tmp_path, monkeypatch):
    """Kept as a session keeps one that assumes two findings and interprets SGLang's kernels."""
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    engine, reference = results.traces(SCENARIO, results.one_ahead)
    live = LiveEngines(
        environment=pytest.fail, default="0.5.23", device="cpu", logs=tmp_path, assumed=("F-003", "F-007")
    )
    live._oracles[(SCENARIO.checkpoint, live.assumed)] = SimpleNamespace(answer=lambda _scenario, _trace: reference)
    outcome = live.judge(SCENARIO, engine, release="0.5.23", revert=None, cpu_attention="interpreted")
    assert outcome.divergences
    return outcome.save_reproducer(tmp_path)


def test_it_says_how_its_engine_was_started_and_is_replayed_and_bisected_so(reproducer, monkeypatch):
    started = (("F-003", "F-007"), "interpreted")
    assert started_with(*read_reproducer(reproducer)) == started
    setting = bisect_runs._reproducer(reproducer)
    assert (setting.assumed, setting.cpu_attention) == started
    asked = {}

    def plan(_scenarios, **options):
        asked.update(options)
        raise UsageError("far enough")

    monkeypatch.setattr(prepare, "make_plan", plan)
    call("replay", reproducer, code=2)
    assert (asked["assumed"], asked["cpu_attention"], asked["engine"]) == (*started, "0.5.23")
