"""Whose time it is: the innermost owner has it, and SGLang has what lies between calls of ours."""

import types

import pytest

from harness.engine_side import clock
from harness.engine_side.clock import SGLANG, Clock
from harness.engine_side.hooks import HookRegistry


@pytest.fixture
def now(monkeypatch):
    """Nanoseconds, moved on by the test."""
    moment = types.SimpleNamespace(at=0)
    monkeypatch.setattr(clock.time, "thread_time_ns", lambda: moment.at)
    return moment


def test_time_inside_a_hook_is_its_own_but_for_what_it_wraps(now):
    def works(_: object) -> None:
        now.at += 100

    def make(original):
        def wrapper(it):
            now.at += 7
            original(it)
            now.at += 3

        return wrapper

    module = types.ModuleType("worker")
    module.Worker = type("Worker", (), {"run": works})
    hooks = HookRegistry(clock=Clock())
    hooks.wrap(module, "Worker.run", make)
    now.at += 1000
    module.Worker().run()
    module.Worker().run()
    assert hooks.clock.taken() == {SGLANG: [1200, 2], "Worker.run": [20, 2]}
    assert hooks.clock.taken() == {SGLANG: [0, 0], "Worker.run": [0, 0]}


def test_a_call_of_an_object_that_is_watched_has_its_time_even_where_it_raises(now):
    class Recorder:
        def _take(self):
            now.at += 5
            raise LookupError

    told, recorder = Clock(), Recorder()
    told.watch(recorder, "_take")
    with pytest.raises(LookupError):
        recorder._take()
    now.at += 2
    assert told.taken() == {SGLANG: [2, 0], "take": [5, 1]}
