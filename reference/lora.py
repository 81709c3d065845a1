"""A target with a LoRA adapter: W + (alpha / r) B A in place of W (Hu et al. 2021, section 4.1), for every W it names.

Read from folders as PEFT publishes adapters, and written as a target's folder. What it asks for beyond that is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from reference.checkpoint import CheckpointError, built_here, read_json

#: What PEFT calls a module of the model that an adapter is put on.
PREFIX = "base_model.model."
#: What would make it another method, or train more than A and B: key -> the one value that is built here.
PLAIN = {"peft_type": "LORA", "bias": "none"}
OTHERS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")


def adapted(target: Path, adapter: Path, into: Path, *, held: torch.dtype = torch.float32) -> None:
    """Fill the folder `into` with the target that the adapter makes of another; CheckpointError if it is none of it.

    A is [r, in], B [out, r], W [out, in]; their product is taken in float64. held: the dtype in which an engine keeps
    each of the three. It keeps no sum of them, so what is written is the sum in float32, and is to be read so.
    """
    config = read_json(adapter / "adapter_config.json")
    built_here(adapter, config, PLAIN)
    if asked := next((key for key in OTHERS if config.get(key)), None):
        raise CheckpointError(f"{adapter}: {asked} is {config[asked]!r}; this reference builds plain LoRA only")
    weights, parts = _held(target / "model.safetensors", held), _held(adapter / "adapter_model.safetensors", held)
    while parts:
        name, a = next((name, one) for name, one in parts.items())
        module, _, which = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        pair = [parts.pop(f"{PREFIX}{module}.lora_{one}.weight", None) for one in "AB"]
        weight = weights.get(f"{module}.weight")
        if which not in ("A", "B") or pair[0] is None or pair[1] is None or weight is None:
            raise CheckpointError(f"{adapter}: {name!r} {tuple(a.shape)}: no A and B of a matrix that the target has")
        a, b = (one.double() for one in pair if one is not None)
        moved = weight.double() + config["lora_alpha"] / config["r"] * (b @ a)
        weights[f"{module}.weight"] = moved.float()
    shutil.copy(target / "config.json", into)
    content = save({name: weight.contiguous() for name, weight in weights.items()})
    (into / "model.safetensors").write_bytes(content)


def _held(file: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in load_file(file).items()}
