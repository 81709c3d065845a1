"""Triton's interpreter beside a newer NumPy: an array of one element is a number of iterations."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.engine_side.hooks import ImportHooks
from harness.engine_side.replacement_kernels.cpu_ops import CpuOps


class Scope:
    def set_attr(self, owner, name, value):
        setattr(owner, name, value)


def before_3_7(tensor, scope):
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))


def from_3_7_on(tensor, scope):
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


@pytest.mark.parametrize(("own", "entries"), [(before_3_7, 1), (from_3_7_on, 0)])
def test_a_number_is_made_of_one_element_by_every_triton(own, entries):
    module = SimpleNamespace(__name__="interpreter", _patch_lang_tensor=own)
    ops = CpuOps(ImportHooks())
    ops._apply("one_element", "_patch_lang_tensor", "torch")(module)
    tensor = type("Tensor", (), {"handle": SimpleNamespace(data=np.array([3]))})
    module._patch_lang_tensor(tensor, Scope())
    assert list(range(tensor())) == [0, 1, 2]
    assert len(ops.describe()) == entries
    assert (module._patch_lang_tensor is own) == (not entries)
