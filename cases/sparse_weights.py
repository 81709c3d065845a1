"""A target of DeepSeek-V3.2's class with its NextN layer: latent attention behind a sparse indexer, in bfloat16.

The widths are those that SGLang's kernels of a card know, so it is no tiny pair; a CPU engine has no such kernels.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from cases import mla_weights
from cases.mla_weights import LatentRecipe
from cases.recipes import Noise

RECIPE = LatentRecipe(
    name="sparse",
    seed=20251202,
    hidden=1024,
    intermediate=256,
    heads=16,
    q_rank=256,
    kv_rank=512,
    nope=128,
    rotated=64,
    value=128,
    experts=4,
    upper_gain=0.03,
    max_position=4096,
)
HEADS, WIDTH = 32, 128


def written(folder: Path, most: int, *, shared: bool) -> Path:
    """The target's folder, with its NextN layer."""
    noise = Noise(RECIPE.seed)
    pair = mla_weights.pair(noise, RECIPE)
    weights = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in pair.target.items()}
    for layer in range(RECIPE.layers + 1):
        place = f"model.layers.{layer}.self_attn.indexer."
        shapes = {"wq_b": (HEADS * WIDTH, RECIPE.q_rank), "wk": (WIDTH, RECIPE.hidden)}
        for name, shape in (shapes | {"weights_proj": (HEADS, RECIPE.hidden)}).items():
            weights[f"{place}{name}.weight"] = torch.from_numpy(noise.draw(*shape, std=shape[1] ** -0.5))
        weights[f"{place}k_norm.weight"] = 1 + torch.from_numpy(noise.draw(WIDTH, std=0.1))
        weights[f"{place}k_norm.bias"] = torch.from_numpy(noise.draw(WIDTH, std=0.1))
    exact = [name for name in weights if "e_score" in name or ".k_norm." in name]
    held = {name: one if name in exact else one.to(torch.bfloat16) for name, one in weights.items()}
    config = pair.target_config | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": "bfloat16",
        "index_topk": most,
        "index_n_heads": HEADS,
        "index_head_dim": WIDTH,
        **({"index_share_for_mtp_iteration": True} if shared else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
