"""Whose fault it is when a batch dies; no SGLang here, only code that lies where SGLang's would."""

from types import ModuleType

from harness.engine_side.host.blame import watcher
from harness.engine_side.probes.recorder import Recorder
from harness.engine_side.transfer_backend.files import NotServed


def raised(act):
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def in_sglang(text):
    """A function whose code lies in SGLang, as far as a traceback can tell."""
    module = ModuleType("pretended")
    exec(compile(f"def fall():\n    raise RuntimeError({text!r})\n", "/x/sglang/srt/a.py", "exec"), module.__dict__)
    return module.fall


def test_what_fails_in_the_probe_itself_is_no_crash_of_sglang():
    assert watcher(raised(lambda: Recorder().note("something"))) == "recorder"


def test_what_sglang_does_below_a_probe_is_its_own():
    assert watcher(raised(in_sglang("no attribute 'shape'"))) is None


def test_a_device_error_that_our_copy_is_told_of_is_not_taken_for_ours(monkeypatch):
    monkeypatch.setattr(Recorder, "_current", lambda self: raised_on_device())
    assert watcher(raised(lambda: Recorder().note("something"))) is None


def raised_on_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_error_of_ours_that_sglang_made_another_of_stays_ours():
    def wrapped():
        try:
            Recorder().note("something")
        except RuntimeError:
            in_sglang("the batch failed")()

    assert watcher(raised(wrapped)) == "recorder"


def test_what_our_transfer_backend_does_not_serve_is_ours():
    def ask():
        raise NotServed("x")

    assert watcher(raised(ask)) == "transfer backend"
