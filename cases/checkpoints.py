"""Tiny target/draft pairs made on the spot from a seed, byte for byte the same on every machine.

A pair must do what two unrelated random models cannot: agree often, but not always. The draft is therefore the
target's own first layer with the target's other layers and a hidden-state term as the disagreement, so that accept
lengths spread over 1 … k+1. Attention is sharp enough that a position shifted by one, or a wrong token in a chunk's
tail, moves proposals: a pair that hides those mistakes is useless here.

Nothing is trained and no matrix product takes part, so thread counts and BLAS builds cannot change a bit. This
module must not import sglang or transformers, nor the reference (and so torch) unless `measure` is called.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from cases import eagle3_weights, mla_weights, mtp_weights, step_weights, table_weights
from cases.recipes import (
    Eagle3Recipe,
    LatentRecipe,
    MtpRecipe,
    Noise,
    NormedRecipe,
    Qwen3EagleRecipe,
    Qwen3Recipe,
    Recipe,
    StepRecipe,
    TableRecipe,
    Weights,
)
from harness.contract import plain_files

if TYPE_CHECKING:
    from cases.sensitivity import Measurement

#: Raise it whenever the same name and seed would give other bytes.
RECIPE_VERSION = 1
MANIFEST = "manifest.json"


class CheckpointMakeError(ValueError):
    """A pair cannot be made or reused: names the place, what is wrong and what to do."""


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="eagle-tiny", seed=20240626),
        # Attention kernels for GPUs are built for head widths from 64 up.
        Recipe(name="eagle-head64", seed=20240627, hidden=128, intermediate=256, head_dim=64),
        Eagle3Recipe(name="eagle3-tiny", seed=20250303),
        Eagle3Recipe(name="eagle3-two", seed=20250304, aux_layers=(1, 5), draft_vocab=512),
        Eagle3Recipe(
            name="eagle3-wide", seed=20250305, draft_hidden=96, aux_layers=(4,), draft_vocab=510, upper_gain=0.03
        ),
        # One feature as wide as the draft: the one shape at which widths do not tell features from states.
        Eagle3Recipe(name="eagle3-one", seed=20250306, aux_layers=(4,)),
        # Its residual starts behind a norm, as the config of some published heads says.
        NormedRecipe(name="eagle3-normed", seed=20250307),
        MtpRecipe(name="mtp-tiny", seed=20241226),
        StepRecipe(name="mtp-chained", seed=20260202),
        # Targets that SGLang can run under DP attention; the second draft is wider than its target. Its own states fill
        # half of its width, so the copying heads take more of them away than of features: hence its state_gain.
        Qwen3Recipe(name="qwen3-tiny", seed=20250601),
        Qwen3Recipe(name="qwen3-wide", seed=20250603, draft_hidden=128, aux_layers=(1, 3, 5), state_gain=0.28),
        # Four key/value heads, since SGLang on a CPU pads fewer than there are ranks, and then cannot load them.
        Qwen3Recipe(name="qwen3-four", seed=20250605, kv_heads=4),
        Qwen3EagleRecipe(name="qwen3-eagle", seed=20250604, layers=3, upper_gain=0.1),
        # The law of every token is known, so that sampling can be held against it.
        TableRecipe(name="table-tiny", seed=20221130),
        # Latent attention, and a NextN layer for a draft.
        LatentRecipe(name="mla-tiny", seed=20241228),
        TableRecipe(name="table-head64", seed=20221131, hidden=128, intermediate=256, head_dim=64),
    )
}


#: Norms of a target's first layer that an EAGLE-1 head has none of.
ABSENT = ("input_layernorm.weight", "q_norm.weight", "k_norm.weight")
#: What stands for a pair on a device whose kernels are not built for its head width; same vocabulary, same positions.
STAND_INS: dict[tuple[str, str], str] = {
    ("eagle-tiny", "cuda"): "eagle-head64",
    ("table-tiny", "cuda"): "table-head64",
}
#: Pairs that nothing stands for there, and why an engine must not be started with them: it would die of its kernels.
UNFIT: dict[tuple[str, str], str] = {
    ("mla-tiny", "cuda"): "SGLang's kernels for latent attention are built for larger latents and hidden sizes",
}

#: Pairs whose MTP layers read each other's output.
CHAINED = frozenset(name for name, recipe in RECIPES.items() if isinstance(recipe, StepRecipe))
#: Pairs whose draft has a layer a step, and how many.
DRAFT_LAYERS = {
    name: step_weights.LAYERS if name in CHAINED else mtp_weights.LAYERS
    for name, recipe in RECIPES.items()
    if isinstance(recipe, MtpRecipe)
}


def on_device(name: str, device: str) -> str:
    """The pair that an engine on `device` loads for a scenario that names `name`."""
    return STAND_INS.get((name, device), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A pair on disk: `target` and `draft` are folders with config.json and model.safetensors."""

    name: str
    root: Path
    target: Path
    draft: Path
    manifest: dict[str, Any]


def _layer(noise: Noise, recipe: Recipe, *, gain: float) -> Weights:
    """One Llama layer; `gain` scales what it adds to the residual stream."""
    r, unit = recipe, recipe.hidden**-0.5
    wide, narrow = r.heads * r.head_dim, r.kv_heads * r.head_dim
    sharp = r.score_std**0.5 * unit
    return {
        "self_attn.q_proj.weight": noise.draw(wide, r.hidden, std=sharp),
        "self_attn.k_proj.weight": noise.draw(narrow, r.hidden, std=sharp),
        "self_attn.v_proj.weight": noise.draw(narrow, r.hidden, std=unit),
        "self_attn.o_proj.weight": noise.draw(r.hidden, wide, std=gain * r.attention_gain * wide**-0.5),
        "mlp.gate_proj.weight": noise.draw(r.intermediate, r.hidden, std=2 * unit),
        "mlp.up_proj.weight": noise.draw(r.intermediate, r.hidden, std=unit),
        "mlp.down_proj.weight": noise.draw(r.hidden, r.intermediate, std=gain * r.mlp_gain * r.intermediate**-0.5),
        "input_layernorm.weight": np.ones(r.hidden, dtype=np.float32),
        "post_attention_layernorm.weight": np.ones(r.hidden, dtype=np.float32),
    }


def target_weights(noise: Noise, recipe: Recipe) -> Weights:
    weights: Weights = {
        "model.embed_tokens.weight": noise.draw(recipe.vocab, recipe.hidden, std=1.0),
        "model.norm.weight": np.ones(recipe.hidden, dtype=np.float32),
        "lm_head.weight": noise.draw(recipe.vocab, recipe.hidden, std=recipe.logit_std * recipe.hidden**-0.5),
    }
    weights["lm_head.weight"][recipe.vocab - 2 :] = 0.0  # bos and eos: a logit of 0 is never the largest
    for index in range(recipe.layers):
        gain = 1.0 if index == 0 else recipe.upper_gain
        layer = _layer(noise, recipe, gain=gain)
        if isinstance(recipe, Qwen3Recipe):
            layer |= _turning(noise, recipe) | _head_norms(noise, recipe)
        if isinstance(recipe, StepRecipe):
            layer |= step_weights.attention(noise, recipe)
        if isinstance(recipe, LatentRecipe):
            layer = {name: value for name, value in layer.items() if not name.startswith("self_attn.")}
            layer |= mla_weights.attention(noise, recipe, gain=gain)
        weights |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    return weights


def _turning(noise: Noise, recipe: Qwen3Recipe) -> Weights:
    """Query and key projections that turn a row and keep its length, each head in its own way.

    So the head norms divide by the same number in every row, and a draft without such norms can agree with the target.
    Rows of a Hadamard matrix in another order, and signs: no matrix product takes part.
    """
    if recipe.head_dim != recipe.hidden or recipe.hidden & (recipe.hidden - 1):
        raise CheckpointMakeError(f"{recipe.name}: head_dim must equal hidden, a power of two; not {recipe.head_dim}")
    square = np.ones((1, 1), dtype=np.float32)
    while len(square) < recipe.hidden:
        square = np.block([[square, square], [square, -square]])
    size = np.float32((recipe.score_std / recipe.hidden) ** 0.5)

    def head() -> np.ndarray:
        order = np.argsort(noise.draw(recipe.hidden, std=1.0), kind="stable")
        return square[order] * np.sign(noise.draw(recipe.hidden, std=1.0)) * size

    return {
        "self_attn.q_proj.weight": np.concatenate([head() for _ in range(recipe.heads)]),
        "self_attn.k_proj.weight": np.concatenate([head() for _ in range(recipe.kv_heads)]),
    }


def _head_norms(noise: Noise, recipe: Qwen3Recipe) -> Weights:
    """Norms that leave queries and keys as large as the projections made them, so that scores stay sharp."""
    size = np.float32(recipe.score_std**0.5)
    return {
        f"self_attn.{name}.weight": size * (1 + noise.draw(recipe.head_dim, std=recipe.norm_spread))
        for name in ("q_norm", "k_norm")
    }


def _norms_folded(recipe: Recipe, target: Weights) -> Weights:
    """The target with the first layer's head norms in its projections, for a draft layer that has no norms there."""
    if not isinstance(recipe, Qwen3Recipe):
        return target
    folded = dict(target)
    for name, heads in (("q", recipe.heads), ("k", recipe.kv_heads)):
        prefix = f"model.layers.0.self_attn.{name}"
        weight = target[f"{prefix}_norm.weight"] / np.float32(recipe.score_std**0.5)
        folded[f"{prefix}_proj.weight"] = target[f"{prefix}_proj.weight"] * np.tile(weight, heads)[:, None]
    return folded


def draft_weights(noise: Noise, recipe: Recipe, target: Weights) -> Weights:
    """The target's first layer behind an fc that passes the token through and mixes the hidden state in.

    Scaling fc and down_proj by s and dividing q and k by s scales the output by s and changes nothing else.
    """
    scale = np.float32(recipe.draft_scale)
    mix = noise.draw(recipe.hidden, recipe.hidden, std=recipe.hidden_gain * recipe.hidden**-0.5)
    weights: Weights = {
        "fc.weight": np.concatenate([np.eye(recipe.hidden, dtype=np.float32), mix], axis=1) * scale,
        "fc.bias": noise.draw(recipe.hidden, std=0.05) * scale,
    }
    factor = {"self_attn.q_proj": 1 / scale, "self_attn.k_proj": 1 / scale, "mlp.down_proj": scale}
    for name, value in target.items():
        if name.startswith("model.layers.0.") and not name.endswith(ABSENT):
            short = name.removeprefix("model.layers.0.")
            scaled = value * np.float32(factor.get(short.removesuffix(".weight"), 1.0))
            weights[f"layers.0.{short}"] = scaled
    return weights


def base_config(recipe: Recipe, *, architecture: str, layers: int) -> dict[str, Any]:
    """An HF Llama config. bos and eos are the last two ids, which the head never proposes."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": recipe.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": recipe.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": recipe.vocab - 2,
        "eos_token_id": recipe.vocab - 1,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _write_model(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ordered = {name: np.ascontiguousarray(weights[name]) for name in sorted(weights)}
    save_file(ordered, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes private files


def _sums(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _build(recipe: Recipe, root: Path) -> None:
    noise = Noise(recipe.seed)
    target = target_weights(noise, recipe)
    if isinstance(recipe, TableRecipe):
        target = table_weights.target(recipe, target)
    if isinstance(recipe, StepRecipe):
        _write_chained(noise, recipe, root, target)
    elif isinstance(recipe, MtpRecipe):
        _write_mtp(noise, recipe, root, target)
    elif isinstance(recipe, LatentRecipe):
        _write_latent(noise, recipe, root, target)
    else:
        _write_pair(noise, recipe, root, target)
    manifest = _identity(recipe) | {"files": _sums(root)}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def _write_pair(noise: Noise, recipe: Recipe, root: Path, target: Weights) -> None:
    own: dict[str, Any] = {}
    architecture = "LlamaForCausalLMEagle"
    if isinstance(recipe, Eagle3Recipe) and recipe.algorithm == "EAGLE3":
        architecture, own = eagle3_weights.ARCHITECTURE, eagle3_weights.config(recipe)
        draft = eagle3_weights.weights(noise, recipe, _norms_folded(recipe, target))
    else:
        draft = draft_weights(noise, recipe, _norms_folded(recipe, target))
    if isinstance(recipe, TableRecipe):
        draft = table_weights.draft(recipe, draft)
    kind = {"model_type": recipe.target_type}
    config = base_config(recipe, architecture=recipe.target_architecture, layers=recipe.layers) | kind
    _write_model(root / "target", config, target)
    _write_model(root / "draft", base_config(recipe, architecture=architecture, layers=1) | own, draft)


def _write_mtp(noise: Noise, recipe: MtpRecipe, root: Path, target: Weights) -> None:
    """Both folders hold the MTP layers: SGLang's users name one folder for both sides."""
    target["model.norm.weight"] = mtp_weights.uneven(noise, recipe.hidden)
    draft = mtp_weights.weights(noise, hidden=recipe.hidden, hidden_gain=recipe.hidden_gain, target=target)
    config = mtp_weights.config(base_config(recipe, architecture=mtp_weights.ARCHITECTURE, layers=recipe.layers))
    _write_model(root / "target", config, target | draft)
    _write_model(root / "draft", config, draft)


def _write_chained(noise: Noise, recipe: StepRecipe, root: Path, target: Weights) -> None:
    """As _write_mtp; the draft has an embedding and heads of its own."""
    target = step_weights.target(noise, recipe, target)
    draft = step_weights.draft(noise, recipe, target)
    config = step_weights.config(base_config(recipe, architecture=step_weights.ARCHITECTURE, layers=recipe.layers))
    _write_model(root / "target", config, step_weights.stored(target | draft))
    _write_model(root / "draft", config, step_weights.stored(draft))


def _write_latent(noise: Noise, recipe: LatentRecipe, root: Path, target: Weights) -> None:
    """As `_write_mtp`: SGLang takes the NextN layer out of the target's own folder."""
    target["model.norm.weight"] = mtp_weights.uneven(noise, recipe.hidden)
    base = base_config(recipe, architecture=recipe.target_architecture, layers=recipe.layers)
    config, draft = mla_weights.config(recipe, base), mla_weights.nextn(noise, recipe, target)
    _write_model(root / "target", config, target | draft)
    _write_model(root / "draft", config, draft)


def _identity(recipe: Recipe) -> dict[str, Any]:
    fields = json.loads(json.dumps(asdict(recipe)))  # as the manifest gives them back
    return {"name": recipe.name, "recipe_version": RECIPE_VERSION, "recipe": fields}


def _open(recipe: Recipe, root: Path) -> Checkpoint:
    """The pair at `root`, or CheckpointMakeError if it is not the one `recipe` makes."""
    advice = "remove the folder and make it again"
    try:
        manifest = json.loads(plain_files.content(root / MANIFEST))
    except (OSError, ValueError) as error:
        message = f"{root} has no readable {MANIFEST} ({error}): not made by this module; {advice}"
        raise CheckpointMakeError(message) from error
    for key, expected in _identity(recipe).items():
        if manifest.get(key) != expected:
            raise CheckpointMakeError(f"{root}: {key} is {manifest.get(key)!r}, expected {expected!r}; {advice}")
    found, recorded = _sums(root), manifest.get("files", {})
    for name in sorted(found.keys() | recorded.keys()):
        if found.get(name) != recorded.get(name):
            raise CheckpointMakeError(
                f"{root / name} is damaged: sha256 {found.get(name, 'missing')}, "
                f"manifest says {recorded.get(name, 'nothing')}; {advice}"
            )
    return Checkpoint(name=recipe.name, root=root, target=root / "target", draft=root / "draft", manifest=manifest)


def make(name: str, root: Path) -> Checkpoint:
    """The pair called `name` in folder `root`/`name`: made if absent, verified if present.

    The folder appears by one rename, so two processes may make the same pair at the same time.
    Raises CheckpointMakeError for an unknown name and for a damaged or foreign folder.
    """
    if name not in RECIPES:
        raise CheckpointMakeError(f"no checkpoint called {name!r}; allowed: {', '.join(sorted(RECIPES))}")
    return make_recipe(RECIPES[name], root)


def make_recipe(recipe: Recipe, root: Path) -> Checkpoint:
    """As `make`, for a recipe that has no name in the registry."""
    place = Path(root) / recipe.name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{recipe.name}-", dir=place.parent))
        try:
            _build(recipe, work)
            work.chmod(0o755)  # mkdtemp is private; an engine may run as another user
            os.rename(work, place)
        except OSError:
            if not place.exists():  # else another process was first, and its bytes are the same
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return _open(recipe, place)


def measure(checkpoint: Checkpoint, *, prompts: int = 24, chunk: int = 16) -> Measurement:
    """Accept lengths and sensitivities of a pair over random prompts, as the float32 reference sees them."""
    from cases import sensitivity  # here, so that making a pair needs no torch
    from reference.pairs import load_head, load_target

    head = load_head(checkpoint.draft, load_target(checkpoint.target))
    return sensitivity.measure(head, prompts=prompts, chunk=chunk)


def main() -> None:
    """`python -m cases.checkpoints NAME DIR` makes a pair and prints its two folders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", help=f"one of: {', '.join(sorted(RECIPES))}")
    parser.add_argument("root", type=Path)
    arguments = parser.parse_args()
    made = make(arguments.name, arguments.root)
    print(made.target)
    print(made.draft)


if __name__ == "__main__":
    main()
