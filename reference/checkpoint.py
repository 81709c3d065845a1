"""A checkpoint folder: the config that names its arithmetic, and its tensors.

Configs are those that Hugging Face publishes; what one asks for beyond what is built here is refused by name. This
module must not compute anything.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it should be: names the path, what was found and what was expected."""

    exit_code = 2  # whoever named the checkpoint can put it right


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The part of an HF Llama config.json that changes the arithmetic."""

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    tied: bool

    @staticmethod
    def read(path: Path, *, architecture: str, or_else: str | None = None, rotation: str = "default") -> Config:
        """Read `path`/config.json; CheckpointError if it is missing, foreign, or asks for what is not built here.

        or_else: a second architecture that is as good. rotation: the only kind of rotary embedding that is allowed.
        """
        file = Path(path) / "config.json"
        raw = read_json(file)
        found = of_architecture(file, raw, *[name for name in (architecture, or_else) if name is not None])
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_type": rotation}
        built_here(file, {**wanted, **raw, "rope_type": rope_type}, wanted)  # what a config leaves out is as wanted
        with all_keys(file, "HF Llama"):
            return Config(
                architecture=found,
                vocab=raw["vocab_size"],
                hidden=raw["hidden_size"],
                intermediate=raw["intermediate_size"],
                layers=raw["num_hidden_layers"],
                heads=raw["num_attention_heads"],
                kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
                head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
                eps=raw["rms_norm_eps"],
                rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
                tied=raw.get("tie_word_embeddings", False),
            )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a config.json; CheckpointError if there is none."""
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error}); expected an HF config") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: holds a {type(raw).__name__}; expected an HF config")
    return raw


def of_architecture(file: Path, raw: Mapping[str, Any], *allowed: str) -> str:
    """The one architecture that a config names; CheckpointError if it is none of those allowed."""
    found = raw.get("architectures")
    for name in allowed:
        if found == [name]:
            return name
    words = " or ".join(repr([one]) for one in allowed)
    raise CheckpointError(f"{file}: architectures is {found!r}; expected {words}")


def built_here(file: Path, raw: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """CheckpointError for the first key of a config that is anything but the one value that is built here."""
    for key, only in wanted.items():
        if raw.get(key) != only:
            raise CheckpointError(f"{file}: {key} is {raw.get(key)!r}; this reference builds only {only!r}")


@contextlib.contextmanager
def all_keys(file: Path, kind: str) -> Iterator[None]:
    """A key that is looked for in a config and is not there is a CheckpointError; kind: whose config it should be."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{file}: has no {error.args[0]!r}; expected a config as {kind} has it") from error


def a_pair(path: Path, draft: Config, *, vocab: int, hidden: int, layers: int | None = None) -> None:
    """CheckpointError if a draft's config speaks of another target. layers: where it counts the target's layers."""
    sizes = {"hidden": ("hidden size", hidden), "vocab": ("vocab size", vocab), "layers": ("num_hidden_layers", layers)}
    for name, (words, expected) in sizes.items():
        found = getattr(draft, name)
        if expected is not None and found != expected:
            raise CheckpointError(f"{path}: {words} is {found}; expected the target's {expected}: not a pair")


class Weights:
    """The tensors of a checkpoint folder, by name; each is read when it is taken, and held in one dtype on a device."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.path, self.dtype, self.device = Path(path), dtype, torch.device(device)
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self.path}: no *.safetensors file; expected at least one")
        self._where: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{file}: damaged ({error}); expected a safetensors file") from error
            self._where |= dict.fromkeys(opened.keys(), (file, opened))  # type: ignore[no-untyped-call]

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must exist and have `shape`."""
        if name not in self._where:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}; expected shape {shape}")
        opened = self._where[name][1]
        found = tuple(opened.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(f"{self.path}: {name!r} has shape {found}; expected {shape}")
        stored: Tensor = opened.get_tensor(name)
        held = stored.to(self.dtype) if stored.is_floating_point() else stored
        # a tensor as it is in the file stays a view of it; a copy does not
        return held.to(self.device) if held is not stored or self.device.type != "cpu" else stored.clone()
