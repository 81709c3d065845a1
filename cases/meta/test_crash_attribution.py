"""Whose code made a batch fail; no SGLang here, only code that lies where SGLang's would."""

import sys
from types import ModuleType

import pytest

from harness.engine_side.hooks import around
from harness.engine_side.host.crash_attribution import AT_WORK, HARNESS, not_built, not_imported, unmade, watcher
from harness.engine_side.probes.recorder import Recorder
from harness.engine_side.transfer_backend.files import NotServed


def in_sglang(text):
    """Runs code that lies in SGLang, by its traceback, and fails."""
    module = ModuleType("pretended")
    exec(compile(f"def fall():\n    raise RuntimeError({text!r})\n", "/x/sglang/srt/a.py", "exec"), module.__dict__)
    module.fall()


def in_probe():
    Recorder().note("something")


def remade_by_sglang():
    try:
        in_probe()
    except RuntimeError:
        in_sglang("the batch failed")


def on_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def not_served():
    raise NotServed("x")


def wrapped(original):
    """What a wrapper of ours makes of a function: it passes on what it is given."""
    module = ModuleType("wraps")
    text = "make = lambda original: lambda worker, *args, **kwargs: original(worker, *args, **kwargs)"
    exec(compile(text, str(HARNESS / "engine_side" / "probes" / "x.py"), "exec"), module.__dict__)
    return module.make(original)


def called_as_it_cannot_be():
    wrapped(lambda worker, batch: None)("worker", "batch", pp_proxy_tensors=None)


def around_what_was_called_so():
    """The same of a function that is given the original before what it passes on."""
    module = ModuleType("wraps")
    text = "call = lambda original, worker, *args, **kwargs: original(worker, *args, **kwargs)"
    exec(compile(text, str(HARNESS / "engine_side" / "probes" / "x.py"), "exec"), module.__dict__)
    return around(module.call)(lambda worker, batch: None)


@pytest.mark.parametrize(
    ("act", "ours"),
    [
        (in_probe, "recorder"),
        (lambda: in_sglang("no attribute 'shape'"), None),
        (remade_by_sglang, "recorder"),
        (not_served, "transfer backend"),
        (called_as_it_cannot_be, None),
        (lambda: around_what_was_called_so()("worker", "batch", pp_proxy_tensors=None), None),
        (lambda: around_what_was_called_so()(), None),
    ],
)
def test_what_fails_in_what_only_looks_on_is_ours_and_all_else_is_sglangs(act, ours):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()
    assert watcher(caught.value) == ours


REQUEST = """
class Req:
    def __init__(self, rid):
        {made}
        self.text = ""

    def named(self):
        return {read}

    def begin(self):
        {later}
"""


@pytest.mark.parametrize(
    ("made", "read", "later", "ours"),
    [
        ("pass", "self.rid", "pass", None),
        ("self.rid = rid", "self.rid", "pass", None),
        ("self.name = rid", "self.name", "pass", "recorder"),
        ("pass", "self.rid", "self.rid = 1", "recorder"),
        ("pass", "self.rid if hasattr(self, 'rid') else ''", "pass", "recorder"),
        ("pass", "self.text.rid", "pass", "recorder"),
    ],
    ids=["never-set", "set-by-the-file", "called-otherwise", "set-later", "asked-for", "of-another"],
)
def test_what_sglangs_own_class_counts_on_is_not_ours_to_lack(tmp_path, monkeypatch, made, read, later, ours):
    """Whoever looked at it first; the file is read, since functions may have been given other code."""
    file = tmp_path / "request.py"
    file.write_text(REQUEST.format(made=made, read=read, later=later))
    module = ModuleType("sglang.srt.pretended")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__file__ = str(file)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    monkeypatch.setattr(module.Req.__init__, "__code__", (lambda self, rid: None).__code__)
    monkeypatch.setattr(Recorder, "_current", lambda self: module.Req("a").rid)
    with pytest.raises(AttributeError) as caught:
        in_probe()
    assert watcher(caught.value) == ours
    assert unmade(caught.value) == ("" if ours else "Req.rid, which Req.named reads")


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("on = False\nif on:\n    from sgl_kernel import copy_rows as copied\n", "copied"),
        ("from math import inf\n", ""),
    ],
)
def test_a_name_that_sglang_imports_for_other_devices_is_no_crash_of_its_own(tmp_path, text, lacks):
    file = tmp_path / "sglang" / "a.py"
    file.parent.mkdir()
    file.write_text(f"{text}def fall():\n    copied(1)\n")
    module = ModuleType("pretended")
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    with pytest.raises(NameError) as caught:
        module.fall()
    assert not_imported(caught.value) == lacks
    cleaning_up = AttributeError("no attribute 'synchronize'")
    cleaning_up.__context__ = caught.value
    assert not_imported(cleaning_up) == lacks
    with pytest.raises(RuntimeError) as other:
        in_sglang("copied")
    assert not_imported(other.value) == ""


def lies_in(file, text):
    """Fails in code that lies in `file`, by its traceback."""
    module = ModuleType("pretended")
    exec(compile(f"def fall():\n    raise {text}\n", file, "exec"), module.__dict__)
    module.fall()


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        (
            "/x/tvm_ffi/cpp/extension.py",
            'RuntimeError("ninja exited with status 1\\nlog")',
            "RuntimeError: ninja exited",
        ),
        ("/x/torch/utils/cpp_extension.py", 'OSError("CUDA_HOME is not set")', "OSError: CUDA_HOME is not set"),
        (
            "/x/torch/_ops.py",
            'RuntimeError("(/deepgemm/third-party/deep_jit/x.hpp:92) failed to open")',
            "RuntimeError: ",
        ),
        ("/x/sglang/srt/a.py", 'RuntimeError("no attribute")', ""),
    ],
)
def test_a_kernel_that_cannot_be_built_on_a_machine_is_no_crash_of_sglangs(file, text, says):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        lies_in(file, text)
    remade = RuntimeError("Capture CUDA graph failed")
    remade.__cause__ = caught.value
    for error in (caught.value, remade):
        found = not_built(error)
        assert found.startswith(says)
        assert bool(found) == bool(says)
        assert "log" not in found


def test_a_device_error_that_our_copy_receives_is_not_taken_for_ours(monkeypatch):
    monkeypatch.setattr(Recorder, "_current", lambda self: on_device())
    with pytest.raises(RuntimeError) as caught:
        in_probe()
    assert watcher(caught.value) is None


def test_what_is_said_to_be_at_work_is_there():
    there = {path.stem for path in HARNESS.rglob("*") if path.is_dir() or path.suffix == ".py"}
    assert set(AT_WORK) <= there
