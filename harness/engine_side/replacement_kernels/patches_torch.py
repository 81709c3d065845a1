"""What SGLang asks of torch without looking at its device: pinned memory, events, streams, devices by name.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch

from .patches import Note, View, on_cpu, register, without_pinning


@register
def cuda_noop(module: ModuleType, argument: str, note: Note) -> None:
    for name in argument.split(","):
        setattr(torch.cuda, name, lambda *_a, **_k: None)
        note(f"torch.cuda.{name} (for {module.__name__})", "no-op", "none", "called without a device check")


@register
def unpinned(module: ModuleType, argument: str, note: Note) -> None:
    why = "there is nothing to pin memory for"
    module.torch = View(torch, tensor=without_pinning(torch.tensor), zeros=without_pinning(torch.zeros))  # type: ignore[attr-defined]
    note(f"{module.__name__}: torch.tensor(pin_memory=)", "no-op", "none", why)
    if argument:
        torch.Tensor.pin_memory = lambda pinned, *_args: pinned  # type: ignore[method-assign]
        note(f"Tensor.pin_memory (for {module.__name__})", "no-op", "none", why)


@register
def cpu_device(module: ModuleType, argument: str, note: Note) -> None:
    module.torch = View(torch, empty=on_cpu(torch.empty), full=on_cpu(torch.full))  # type: ignore[attr-defined]
    what = f"{module.__name__}: torch.empty, torch.full (device='cuda')"
    note(what, "no-op", "none", "names a device instead of asking for the batch's")


@register
def device_name(module: ModuleType, argument: str, note: Note) -> None:
    module.torch = View(torch, **{argument: on_cpu(getattr(torch, argument))})  # type: ignore[attr-defined]
    note(f"{module.__name__}: torch.{argument}", "remap", "none", 'names the device "cuda" whatever it runs on')


@register
def own_device(module: ModuleType, argument: str, note: Note) -> None:
    """The device that torch was built for, which the module asks for whatever it runs on; `argument`: by what."""
    asked = getattr(torch, argument)
    if asked() is not torch.cpu:
        own = {argument: lambda device=None: torch.cpu if device is None else asked(device)}
        module.torch = View(module.torch, **own)  # type: ignore[attr-defined]
        note(f"{module.__name__}: torch.{argument}", "remap", "none", "a torch with CUDA means a card by it")


@register
def no_event(module: ModuleType, argument: str, note: Note) -> None:
    """Events of streams, which the module makes of `torch.cuda` whatever it runs on; `argument`: their class."""
    event = SimpleNamespace(**dict.fromkeys(("record", "wait", "synchronize"), lambda *_a: None))
    module.torch = View(torch, cuda=View(torch.cuda, **{argument: lambda *_a, **_k: event}))  # type: ignore[attr-defined]
    note(f"{module.__name__}: torch.cuda.{argument}", "no-op", "none", "CPU streams are not concurrent")


@register
def record_stream(module: ModuleType, argument: str, note: Note) -> None:
    torch.Tensor.record_stream = lambda *_a, **_k: None  # type: ignore[method-assign]
    note("torch.Tensor.record_stream", "no-op", "none", "CPU streams are not concurrent")


@register
def wide_product(module: ModuleType, argument: str, note: Note) -> None:
    """The router's product, for which torch takes an `out_dtype` on a GPU alone."""

    def product(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.mm(left, right).to(out_dtype or left.dtype)

    module.torch = View(torch, **{argument: product})  # type: ignore[attr-defined]
    note(f"{module.__name__}: torch.{argument}(out_dtype=)", "remap", "none", "torch has it on a GPU alone")


@register
def unregistered_host(module: ModuleType, argument: str, note: Note) -> None:
    setattr(module, argument, lambda *_a, **_k: None)
    note(f"{module.__name__}.{argument}", "no-op", "none", "there is no GPU to register host memory with")


@register
def unreserved_host(module: ModuleType, argument: str, note: Note) -> None:
    setattr(module, argument, 0)
    note(f"{module.__name__}.{argument}", "no-op", "none", "10 GB kept free for a pool of some kB")


@register
def kept(module: ModuleType, argument: str, note: Note) -> None:
    """A setting that SGLang takes back on a CPU, where the release has such a place."""
    if hasattr(module, argument):
        setattr(module, argument, lambda *_a, **_k: None)
        note(f"{module.__name__}.{argument}", "no-op", "none", "the scheduling that a GPU has, as asked for")
