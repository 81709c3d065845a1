"""LoRA adapters for targets of the tiny pairs, made on the spot from a seed, byte for byte the same on every machine.

A folder as PEFT writes it. An adapter moves what it is put on by a tenth, so that a row without it, or with another,
is another row. It must not import torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

from cases.folders import made_once
from cases.recipes import Noise

#: Adapter -> its rank and alpha; a sum of ranks that are not alike shows one that is taken for the other.
ADAPTERS = {"first": (4, 8.0), "second": (8, 4.0)}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: How much an adapter moves a matrix, relative to it.
SHARE = 0.1


def of_target(target: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> folder of adapters for a tiny pair's target, beside the pair; made if it is absent."""
    places = {name: beside(target, f"adapter-{name}") for name in names}
    return {name: str(made_once(place, partial(_write, name, target))) for name, place in places.items()}


def beside(target: Path, what: str) -> Path:
    """Where something lies that was made for a pair's target."""
    return target.parent.with_name(f"{target.parent.name}-{what}")


def _write(name: str, target: Path, work: Path) -> None:
    rank, alpha = ADAPTERS[name]
    found = dict[str, np.ndarray]()
    for key, weight in sorted(load_file(target / "model.safetensors").items()):
        module = key.removesuffix(".weight")
        if ".layers." in key and module.rpartition(".")[2] in MODULES:
            noise, (rows, columns) = Noise(zlib.crc32(f"{name} {key}".encode())), weight.shape
            std = SHARE * float(np.std(weight)) * rank / alpha * (rank * 1.0) ** -0.5
            found[f"base_model.model.{module}.lora_A.weight"] = noise.draw(rank, columns, std=1.0)
            found[f"base_model.model.{module}.lora_B.weight"] = noise.draw(rows, rank, std=std)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(MODULES), "bias": "none"}
    (work / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (work / "adapter_model.safetensors").write_bytes(save(found, metadata={"format": "pt"}))
