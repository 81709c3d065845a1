"""A checkpoint folder: the config that names its arithmetic, and its tensors.

Configs are those that Hugging Face publishes; what one asks for beyond what is built here is refused by name. This
module must not compute anything.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it should be: names the path, what was found and what was expected."""

    exit_code = 2  # whoever named the checkpoint can put it right


class DamagedError(CheckpointError):
    """A checkpoint that does not hold what its own config says, or no pair: nobody could compute it.

    Any other CheckpointError says what is not built here.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of a model, and the few other numbers that all of them have."""

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


def sizes(raw: Mapping[str, Any]) -> Config:
    """Sizes as Hugging Face's keys name them; KeyError for one that is missing (see `all_keys`)."""
    heads = raw["num_attention_heads"]
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return Config(
        architecture=raw["architectures"][0],
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        eps=raw["rms_norm_eps"],
        rope_theta=float(raw.get("rope_theta") or scaling.get("rope_theta") or 10000.0),
        tied=raw.get("tie_word_embeddings", False),
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a config.json; CheckpointError if there is none."""
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{file}: cannot be read as JSON ({error}); expected an HF config") from error
    if not isinstance(raw, dict):
        raise DamagedError(f"{file}: holds a {type(raw).__name__}; expected an HF config")
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
    """A key that is looked for in a config and is not there is a CheckpointError; kind: whose config it should be.

    Any CheckpointError in there names the file.
    """
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{file}: has no {error.args[0]!r}; expected a config as {kind} has it") from error
    except CheckpointError as error:
        raise error if str(file) in str(error) else type(error)(f"{file}: {error}") from error


def a_pair(path: Path, draft: Config, *, vocab: int, hidden: int, layers: int | None = None) -> None:
    """CheckpointError if a draft's config speaks of another target. layers: where it counts the target's layers."""
    sizes = {"hidden": ("hidden size", hidden), "vocab": ("vocab size", vocab), "layers": ("num_hidden_layers", layers)}
    for name, (words, expected) in sizes.items():
        found = getattr(draft, name)
        if expected is not None and found != expected:
            raise DamagedError(f"{path}: {words} is {found}; expected the target's {expected}: not a pair")


class Weights:
    """The tensors of a checkpoint folder, by name; each is read when it is taken, and held in one dtype on a device.

    Safetensors, else torch's .bin files; those that an index names where there is one.

    exact: endings of names that stay as they are stored. raised: which are stored less one, and come as they are
    multiplied. called: what is called otherwise in this folder.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        exact: tuple[str, ...] = (),
        raised: Callable[[str], bool] | None = None,
        called: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.path, self.dtype, self.device = Path(path), dtype, torch.device(device)
        self._exact, self._raised, self._called = exact, raised, called
        self._read = {name: read for file in _weight_files(self.path) for name, read in _tensors(file)}
        self.taken = set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._read

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must exist and have `shape`."""
        name = self._called.get(name, name)
        if name not in self._read:
            raise DamagedError(f"{self.path}: has no tensor {name!r}; expected shape {shape}")
        stored = self._read[name]()
        if tuple(stored.shape) != shape:
            raise DamagedError(f"{self.path}: {name!r} has shape {tuple(stored.shape)}; expected {shape}")
        self.taken.add(name)
        held = self._held(name, stored).to(self.device)
        if held.is_floating_point() and not _is_finite(held):
            raise DamagedError(
                f"{self.path}: {name!r} holds NaN or infinity in {str(held.dtype).removeprefix('torch.')}; "
                "expected finite numbers"
            )
        return held.clone() if held is stored else held  # not a view of the file

    def _held(self, name: str, stored: Tensor) -> Tensor:
        """The tensor in the dtype in which it is kept; of one that is raised, half a sum would be rounded."""
        held = stored.to(self.dtype) if stored.is_floating_point() and not name.endswith(self._exact) else stored
        raised = self._raised is not None and self._raised(name)
        return held.to(torch.promote_types(held.dtype, torch.float32)) + 1 if raised else held

    def all_taken(self, but: Collection[str] = ()) -> None:
        """CheckpointError for a tensor that nobody took; tables of a rotation say nothing that the config does not."""
        for name in sorted(set(self._read) - self.taken - set(but)):
            if not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(f"{self.path}: nothing reads tensor {name!r}; this reference does not know it")


def _is_finite(held: Tensor) -> bool:
    """Without anything as large again: that would be more than a reference says it takes."""
    return not held.numel() or bool(torch.stack(held.aminmax()).isfinite().all())


def _weight_files(path: Path) -> list[Path]:
    for pattern, index in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        if files := sorted(path.glob(pattern)):
            if not (path / index).exists():
                return files
            named = [path / name for name in sorted(set(read_json(path / index)["weight_map"].values()))]
            if missing := [file.name for file in named if file not in files]:
                raise DamagedError(f"{path}: {index} names {missing[0]}, which is not there")
            return named
    raise DamagedError(f"{path}: no *.safetensors file and no pytorch_model*.bin; expected at least one")


def _tensors(file: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Each tensor's name in a file, and how it is read."""
    try:
        if file.suffix == ".bin":
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            yield from ((name, partial(loaded.__getitem__, name)) for name in loaded)
        else:
            opened: Any = safe_open(file, framework="pt")
            names: list[str] = opened.keys()  # it is no mapping
            yield from ((name, partial(opened.get_tensor, name)) for name in names)
    except (SafetensorError, OSError, RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise DamagedError(f"{file}: damaged ({error}); expected whole tensors") from error
