"""What a rotation asks of a card: its frequencies go there once, since each copy waits for all that runs there."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference.rotation import Rotation, plain_frequencies


class Brought(TorchDispatchMode):
    """Counts what is copied from the host's memory to another device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        there = str((kwargs or {}).get("device", "cpu"))
        self.count += func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" != there
        return func(*args, **(kwargs or {}))


def test_frequencies_are_brought_to_a_device_once():
    rotation = Rotation(frequencies=plain_frequencies(8, 10000.0))
    rows, positions = torch.empty(3, 2, 8, device="meta"), torch.arange(3, device="meta")
    with Brought() as brought:
        for _ in range(4):
            rotation.turn(rows, positions)
    assert brought.count == 1
