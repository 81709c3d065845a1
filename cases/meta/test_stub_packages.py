"""Packages that SGLang imports at module level: the real one where it loads, a stub where it is not there or cannot."""

import importlib
import sys

import pytest

from harness.engine_side.hooks import ImportHooks
from harness.engine_side.replacement_kernels import cpu_ops
from harness.engine_side.replacement_kernels.cpu_ops import CpuOps
from harness.engine_side.replacement_kernels.cpu_sampling import verify_sampled

#: As `sgl_kernel`, which the environment of these tests may have itself.
PACKAGE = "kernels_of_a_test"
WALK = "tree_speculative_sampling_target_only"
LOADS = f"{WALK} = 'its own'\n"
LACKS_CUDA = "from . import utils\nraise ImportError('\\n[sgl_kernel] could not load\\nlibcuda.so.1: no such file')\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a package with this text, and the hooks of a release that looks a walk up in it."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(cpu_ops, "EVERYWHERE", ())
    monkeypatch.setattr(cpu_ops, "STUB_PACKAGES", (PACKAGE,))
    before = set(sys.modules)

    def install(text):
        if text is not None:
            (tmp_path / PACKAGE).mkdir()
            (tmp_path / PACKAGE / "__init__.py").write_text(text)
            (tmp_path / PACKAGE / "utils.py").write_text("real = True\n")
        hooks = ImportHooks()
        hooks.install()
        ops = CpuOps(hooks)
        ops.install(patches=[(PACKAGE, "sampling", "")], attention="torch")
        return ops

    yield install
    for name in {*sys.modules} - before:
        if name.startswith(PACKAGE):
            del sys.modules[name]


def stubbed(ops):
    return [entry["reason"] for entry in ops.describe() if entry["by"] == "import stub"]


def test_a_package_that_loads_is_used(installed):
    ops = installed(LOADS)
    assert importlib.import_module(f"{PACKAGE}.utils").real
    assert stubbed(ops) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "imported at module level, never used on this path"),
        (LACKS_CUDA, "cannot be loaded on this machine: [sgl_kernel] could not load"),
        ("import ctypes\nctypes.CDLL('no-such-library.so')\n", "cannot be loaded on this machine: no-such-library.so"),
    ],
)
def test_one_that_is_not_there_or_cannot_be_loaded_is_a_stub_with_our_kernels(installed, text, why):
    ops = installed(text)
    module = importlib.import_module(PACKAGE)
    assert getattr(module, WALK) is verify_sampled
    assert not hasattr(importlib.import_module(f"{PACKAGE}.utils"), "__file__")  # nor is a part of it the real one
    assert module.anything() is not None
    (reason,) = stubbed(ops)
    assert reason.startswith(why)


def test_another_error_of_a_package_is_its_own(installed):
    installed("raise ZeroDivisionError('a defect')\n")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(PACKAGE)
