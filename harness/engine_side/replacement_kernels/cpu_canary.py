"""What SGLang's canary of its KV cache needs beside its kernels, which have a torch reference: copies to the host.

Engine side. It must not touch what the canary compares or says.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ..hooks import ImportHooks


def install(hooks: ImportHooks) -> None:
    """Streams that take a device, and copies that are there at once instead of in pinned memory."""

    class Stream(torch.cpu.Stream):
        def __init__(self, priority: int = -1, device: Any = None) -> None:
            super().__init__(priority)

    torch.cpu.Stream = Stream  # type: ignore[misc]
    hooks.after("sglang.srt.kv_canary.runner.future_tensor", _copy_at_once)


def _copy_at_once(module: types.ModuleType) -> None:
    def device_to_host(cls: Any, xs_device: Any, **_where: Any) -> Any:
        held = xs_device if isinstance(xs_device, dict) else {module._DUMMY_DICT_KEY: xs_device}
        copies = {name: one.detach().clone() if isinstance(one, torch.Tensor) else one for name, one in held.items()}
        return cls(_data=copies, _event=torch.cpu.Event(), _retained_device_clones={})

    module.FutureTensors.device_to_host = classmethod(device_to_host)
