"""What models and layers of SGLang do otherwise on a CPU than on a GPU.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

from . import cpu_experts
from .patches import Note, View, register, without_pinning


@register
def empty_rope(module: ModuleType, argument: str, note: Note) -> None:
    original = module.RotaryEmbedding.forward_native

    def forward_native(self: Any, positions: torch.Tensor, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if positions.numel() == 0:
            return query, key
        return original(self, positions, query, key, *args, **kwargs)

    module.RotaryEmbedding.forward_native = forward_native
    what = f"{module.__name__}.RotaryEmbedding.forward_native (no rows)"
    note(what, "no-op", "none", "the CPU version cannot view an empty batch")


@register
def config_dtype(module: ModuleType, argument: str, note: Note) -> None:
    original = getattr(module, argument).__init__
    what, why = f"{module.__name__}.{argument}: config.dtype", "that of the checkpoint, whatever the engine's is"

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config.dtype = torch.get_default_dtype()
        note(what, "remap", "none", why)
        original(self, config, *args, **kwargs)

    getattr(module, argument).__init__ = __init__


@register
def plain_rope(module: ModuleType, argument: str, note: Note) -> None:
    original, what = getattr(module, argument), f"{module.__name__}.{argument} (no rope_scaling)"

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("rope_scaling") is not None:
            return original(*args, **kwargs)
        note(what, "remap", "none", "SGLang's own rotation, as on a GPU; on a CPU it has YaRN's alone")
        return original(*args, **{**kwargs, "device": None})

    setattr(module, argument, wrapper)


@register
def flat_bias(module: ModuleType, argument: str, note: Note) -> None:
    original, what = getattr(module, argument), f"{module.__name__}.{argument} (correction_bias)"

    def flat(*args: Any, correction_bias: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if correction_bias is not None and correction_bias.dim() == 2:
            note(what, "remap", "none", "of one dimension, as SGLang makes it for its CPU engine")
            correction_bias = correction_bias.squeeze(0)
        return original(*args, correction_bias=correction_bias, **kwargs)

    setattr(module, argument, flat)


@register
def squared_experts(module: ModuleType, argument: str, note: Note) -> None:
    original, native = getattr(module, argument).__init__, "sglang.srt.layers.moe.fused_moe_native"

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        note(f"{native}.moe_forward_native", "stand-in", "experts", "knows no such activation on a CPU")
        importlib.import_module(native).moe_forward_native = cpu_experts.squared_experts  # type: ignore[attr-defined]
        original(self, *args, **kwargs)

    getattr(module, argument).__init__ = __init__


@register
def token_mask(module: ModuleType, argument: str, note: Note) -> None:
    """Releases that have no kernel for a mask of tokens on a CPU get the one that newer releases call there.

    And those that pin its memory whatever they run on do not.
    """
    owner, makes = getattr(module, argument), getattr(module, "_allocate_token_bitmask", None)
    if makes is not None and "is_pin_memory_available" not in inspect.getsource(makes):
        module.torch = View(torch, full=without_pinning(torch.full))  # type: ignore[attr-defined]
        what = f"{module.__name__}: torch.full(pin_memory=)"
        note(what, "no-op", "none", "there is nothing to pin memory for")
    if '"cpu"' in inspect.getsource(owner.apply_vocab_mask):
        return

    def apply_vocab_mask(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        import xgrammar

        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

    owner.apply_vocab_mask = apply_vocab_mask
    what = f"{module.__name__}.{argument}.apply_vocab_mask"
    note(what, "remap", "none", "xgrammar's own kernel for a CPU, as newer releases call it")


@register
def token_numbers(module: ModuleType, argument: str, note: Note) -> None:
    """0.5.11 hands grammars tokens as tensors: xgrammar 0.1.32, which it pins, takes them, a newer one does not."""
    original = getattr(module, argument, None)
    if original is None or "accept_token(draft_tokens[curr])" not in inspect.getsource(original):
        return

    def traverse_tree(after: Any, beside: Any, tokens: Any, grammar: Any, *args: Any, **kwargs: Any) -> Any:
        of_numbers = View(
            grammar,
            accept_token=lambda token: grammar.accept_token(int(token)),
            fill_vocab_mask=lambda mask, node: grammar.fill_vocab_mask(mask, int(node)),
        )
        return original(after, beside, tokens, of_numbers, *args, **kwargs)

    setattr(module, argument, traverse_tree)
    note(f"{module.__name__}.{argument}", "remap", "none", "newer xgrammar takes no tensor for a number")
