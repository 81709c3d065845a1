"""SGLang's own Triton kernels, reached on a CPU and interpreted; and what stands between a batch and them.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from .patches import Note, register


@register
def flag(module: ModuleType, argument: str, note: Note) -> None:
    name, subject = argument.split("=")
    setattr(module, name, True)
    note(f"{module.__name__}.{name}", "flag", subject, "selects SGLang's own Triton kernel, interpreted")


@register
def any_device(module: ModuleType, argument: str, note: Note) -> None:
    """SGLang's own Triton kernels, interpreted, whose launchers refuse tensors that are not a GPU's."""
    for name in argument.split(","):
        code = getattr(module, name).__code__
        names = tuple("is_cpu" if one == "is_cuda" else one for one in code.co_names)
        getattr(module, name).__code__ = code.replace(co_names=names)
        note(f"{module.__name__}.{name}", "flag", "none", "its kernel is interpreted; it asks for a GPU")


@register
def one_element(module: ModuleType, argument: str, note: Note) -> None:
    """Interpreters before Triton 3.7 make a number of an array of one element, which NumPy from 2.4 on refuses."""
    original = getattr(module, argument)
    if "int(self.handle.data)" not in inspect.getsource(original):
        return

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda one: int(one.handle.data.item()))

    setattr(module, argument, patched)
    note(f"{module.__name__}.{argument}", "remap", "none", "NumPy 2.4 makes no number of an array")


@register
def one_processor(module: ModuleType, argument: str, note: Note) -> None:
    setattr(module, argument, lambda _device: 1)
    module.device_context = lambda _device: nullcontext()  # type: ignore[attr-defined]
    note(f"{module.__name__}.{argument}", "remap", "none", "how many rows a block has; a CPU is one processor")


@register
def murmur(module: ModuleType, argument: str, note: Note) -> None:
    def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        shape = (len(seed), len(columns))
        hashed = torch.empty(shape, dtype=torch.uint32)
        blocks = -(-len(columns) // 1024)
        module.murmur_hash32_kernel[(len(seed), blocks)](seed, positions, columns, hashed, *shape, BLOCK_SIZE=1024)
        return hashed

    module.murmur_hash32 = murmur_hash32  # type: ignore[attr-defined]
    what = f"{module.__name__}.murmur_hash32"
    note(what, "flag", "none", "selects SGLang's own Triton kernel, interpreted; no CPU build")


@register
def portable_conv(module: ModuleType, argument: str, note: Note) -> None:
    """The convolution of Mamba-2 layers, which SGLang imports on named devices only; `argument`: where it is."""
    portable = importlib.import_module(argument)
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        for said in (name, f"{name}_triton"):
            setattr(module, said, getattr(portable, name))
        note(f"{module.__name__}.{name}", "flag", "none", "SGLang's own Triton kernel, interpreted")


@register
def untuned(module: ModuleType, argument: str, note: Note) -> None:
    """SGLang's own Triton kernels in package `argument`, interpreted: with one of the tile sizes that they choose
    from by timing, which wants a GPU, and without naming the device that they start on."""
    for name, part in list(sys.modules.items()):
        for kernel in vars(part).values() if name.startswith(argument) else ():
            if type(kernel).__name__ == "Autotuner":
                kernel.configs = kernel.configs[-1:]
    torch.cpu.device = lambda _index: nullcontext()  # type: ignore[attr-defined]
    note(argument, "flag", "none", "one size of tiles, on the only device there is")


@register
def unregistered(module: ModuleType, argument: str, note: Note) -> None:
    def call(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
        getattr(module._groups[group_name](), f"_{argument}")(output, input)

    setattr(module, f"reg_{argument}", call)
    note(f"{module.__name__}.reg_{argument}", "flag", "none", "calls SGLang's own method; only CUDA is registered")


@register
def batch_invariant(module: ModuleType, argument: str, note: Note) -> None:
    setattr(module, argument, lambda: None)
    what, why = f"{module.__name__}.{argument}", "wants an accelerator; asked for only where seeds decide"
    note(what, "no-op", "none", why)


@register
def sampled_path(module: ModuleType, argument: str, note: Note) -> None:
    """The flag that selects Triton kernels also sends a sampled batch down the greedy path; not while it is one."""
    original = module.eagle_sample

    def eagle_sample(verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.sampling_info.is_all_greedy:
            return original(verify_input, batch, *args, **kwargs)
        setattr(module, argument, False)
        try:
            return original(verify_input, batch, *args, **kwargs)
        finally:
            setattr(module, argument, True)

    module.eagle_sample = eagle_sample  # type: ignore[attr-defined]
