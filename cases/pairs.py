"""The tiny pairs: the recipe of each, what makes it, and which one takes its place on a GPU or in half precision.

A pair must do what two unrelated random models cannot: agree often, but not always. The draft is therefore the
target's own first layer with the target's other layers and a hidden-state term as the disagreement, so that accept
lengths spread over 1 … k+1. Attention is sharp enough that a position shifted by one, or a wrong token in a chunk's
tail, moves proposals: a pair that hides those mistakes is useless here.

To add one: a line in RECIPES. A new kind of draft head: a module `*_weights` with its recipe and the `pair` that
makes it, and a line in KINDS; the reference reads it (`reference.pairs`).
This module must not write files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases import (
    eagle3_weights,
    hybrid_weights,
    llama_weights,
    mamba_weights,
    mla_weights,
    mtp_weights,
    oss_weights,
    step_weights,
    table_weights,
    trained_weights,
)
from cases.hybrid_weights import DenseHybridRecipe, HybridRecipe
from cases.mamba_weights import HalfMambaRecipe, MambaRecipe, NextMambaRecipe
from cases.mla_weights import LatentRecipe
from cases.mtp_weights import FiveLayersRecipe, MtpRecipe, WindowedRecipe
from cases.oss_weights import GptOssRecipe, HalfOssRecipe
from cases.perturbed import perturbed
from cases.recipes import Eagle3Recipe, Noise, NormedRecipe, Pair, Qwen3EagleRecipe, Qwen3Recipe, Recipe
from cases.step_weights import FiveStepLayersRecipe, StepRecipe
from cases.table_weights import TableRecipe
from cases.trained_weights import TrainedEagle3Recipe, TrainedRecipe

_APART: dict[str, Any] = {"hidden": 80, "intermediate": 112, "layers": 7, "heads": 8, "max_position": 640}
_LATENT_512: dict[str, Any] = {
    "hidden": 768,  # SGLang's fused norms of a NextN layer want multiples of 256
    "intermediate": 224,
    "heads": 16,
    "q_rank": 192,
    "kv_rank": 512,
    "nope": 128,
    "rotated": 64,
    "value": 128,  # fa3 takes these widths of heads only, those of published pairs
    "experts": 3,
    "upper_gain": 0.03,
}
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="eagle-tiny", seed=20240626),
        # What an engine of such a pair is given for new weights: the same shapes, another map of tokens too.
        Recipe(name="eagle-next", seed=20240628),
        Eagle3Recipe(name="eagle3-next", seed=20250310, upper_gain=0.03),
        MtpRecipe(name="mtp-next", seed=20241230),
        LatentRecipe(name="mla-next", seed=20241231),
        # Attention kernels for GPUs are built for head widths from 64 up.
        Recipe(name="eagle-head64", seed=20240627, hidden=128, intermediate=256, head_dim=64),
        Recipe(name="eagle-next64", seed=20240629, hidden=128, intermediate=256, head_dim=64),
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
        # Sliding windows: of the target alone, and of target and draft.
        GptOssRecipe(name="oss-tiny", seed=20250807),
        WindowedRecipe(name="mtp-window", seed=20251218, upper_gain=0.03),
        # The same with windows shorter than a draft.
        GptOssRecipe(name="oss-narrow", seed=20250808, window=3),
        *(
            HalfOssRecipe(name=f"oss-{name}{dtype}", seed=seed, window=window, dtype=dtype)
            for name, seed, window in (("", 20250807, 12), ("narrow-", 20250808, 3))
            for dtype in ("float16", "bfloat16")
        ),
        WindowedRecipe(name="mtp-narrow", seed=20251219, upper_gain=0.03, window=2),
        # Targets that SGLang can run under DP attention; the second draft is wider than its target. Its own states fill
        # half of its width, so the copying heads take more of them away than of features: hence its state_gain.
        Qwen3Recipe(name="qwen3-tiny", seed=20250601),
        Qwen3Recipe(name="qwen3-wide", seed=20250603, draft_hidden=128, aux_layers=(1, 3, 5), state_gain=0.28),
        # Four key/value heads, since SGLang on a CPU pads fewer than there are ranks, and then cannot load them.
        Qwen3Recipe(name="qwen3-four", seed=20250605, kv_heads=4),
        Qwen3EagleRecipe(name="qwen3-eagle", seed=20250604, layers=3, upper_gain=0.1),
        # The distribution of every token is known, so that sampling can be held against it.
        TableRecipe(name="table-tiny", seed=20221130),
        # Latent attention, and a NextN layer for a draft.
        LatentRecipe(name="mla-tiny", seed=20241228),
        # Widths that SGLang's kernels for GPUs are built for.
        LatentRecipe(name="mla-latent512", seed=20261209, **_LATENT_512),
        LatentRecipe(name="mla-next512", seed=20261210, **_LATENT_512),
        LatentRecipe(name="mla-apart512", seed=20261211, **{**_APART, **_LATENT_512, "value": 112}),
        # Recurrent states beside attention, and a NextN layer for a draft.
        HybridRecipe(name="hybrid-tiny", seed=20250911),
        DenseHybridRecipe(name="hybrid-dense", seed=20260216),
        MambaRecipe(name="hybrid-mamba", seed=20250420),
        NextMambaRecipe(name="hybrid-mamba-next", seed=20251217),
        *(
            HalfMambaRecipe(name=f"hybrid-mamba-next-{dtype}", seed=20251217, dtype=dtype)
            for dtype in ("float16", "bfloat16")
        ),
        TableRecipe(name="table-head64", seed=20221131, hidden=128, intermediate=256, head_dim=64),
        # Perturbed (below): no two tensors are alike, and no two sizes that mean different things are one.
        Recipe(name="eagle-apart", seed=20261150, **_APART, upper_gain=0.03),
        Recipe(
            name="eagle-apart64",
            seed=20261150,
            **{**_APART, "hidden": 144, "intermediate": 176, "heads": 6},
            head_dim=64,
            upper_gain=0.03,
        ),
        Eagle3Recipe(
            name="eagle3-apart",
            seed=20261130,
            **{**_APART, "hidden": 160, "intermediate": 192, "layers": 9, "heads": 4},
            upper_gain=0.02,
            aux_layers=(1, 4, 6),
            draft_hidden=160,
            vocab=520,
            draft_vocab=520,
        ),
        FiveLayersRecipe(name="mtp-apart", seed=20261203, **_APART, upper_gain=0.03),
        FiveStepLayersRecipe(name="mtp-chained-apart", seed=20261204, **{**_APART, "layers": 45}),
        Qwen3Recipe(
            name="qwen3-apart",
            seed=20261202,
            layers=9,
            intermediate=96,
            max_position=640,
            upper_gain=0.02,
            aux_layers=(1, 4, 6),
            vocab=520,
            draft_vocab=520,
        ),
        LatentRecipe(
            name="mla-apart",
            seed=20261201,
            # a multiple of 32: on a CPU SGLang widens experts to one, and leaves what it adds as memory was
            **{**_APART, "heads": 4, "intermediate": 224},
            upper_gain=0.03,
            q_rank=60,
            kv_rank=40,
            nope=28,
            value=24,
            experts=3,
        ),
        # Trained on text and kept as files: logits as peaked, and accepted runs as long, as those of published pairs.
        TrainedRecipe(name="trained-eagle1"),
        TrainedEagle3Recipe(name="trained-eagle3"),
    )
}


#: Pairs whose draft and norms are moved, see `cases.perturbed`.
PERTURBED = frozenset(
    name
    for name, recipe in RECIPES.items()
    if "-apart" in name
    or name in ("eagle3-next", "mtp-next", "mla-next", "mla-next512")  # so that a norm that is not updated shows
    or isinstance(recipe, GptOssRecipe | WindowedRecipe | HybridRecipe | MambaRecipe)
)
#: What makes the pair of a kind of recipe.
KINDS: dict[type[Recipe], Callable[[Noise, Any], Pair]] = {
    Recipe: llama_weights.pair,
    Qwen3EagleRecipe: llama_weights.pair,
    Eagle3Recipe: eagle3_weights.pair,
    NormedRecipe: eagle3_weights.pair,
    Qwen3Recipe: eagle3_weights.pair,
    MtpRecipe: mtp_weights.pair,
    FiveLayersRecipe: mtp_weights.pair,
    WindowedRecipe: mtp_weights.pair,
    GptOssRecipe: oss_weights.pair,
    HalfOssRecipe: oss_weights.pair,
    HybridRecipe: hybrid_weights.pair,
    DenseHybridRecipe: hybrid_weights.pair,
    MambaRecipe: mamba_weights.pair,
    NextMambaRecipe: mamba_weights.pair,
    HalfMambaRecipe: mamba_weights.pair,
    StepRecipe: step_weights.pair,
    FiveStepLayersRecipe: step_weights.pair,
    LatentRecipe: mla_weights.pair,
    TableRecipe: table_weights.pair,
    TrainedRecipe: trained_weights.pair,
    TrainedEagle3Recipe: trained_weights.pair,
}
#: The pair to use instead on a device whose kernels are not built for its head width, or in a dtype that its config
#: does not name; same vocabulary, same positions.
MADE_INSTEAD: dict[tuple[str, str], str] = {
    ("eagle-tiny", "cuda"): "eagle-head64",
    ("eagle-apart", "cuda"): "eagle-apart64",
    ("table-tiny", "cuda"): "table-head64",
    ("eagle-next", "cuda"): "eagle-next64",
    ("mla-tiny", "cuda"): "mla-latent512",
    ("mla-next", "cuda"): "mla-next512",
    ("mla-apart", "cuda"): "mla-apart512",
    ("oss-tiny", "float16"): "oss-float16",
    ("oss-tiny", "bfloat16"): "oss-bfloat16",
    ("oss-narrow", "float16"): "oss-narrow-float16",
    ("oss-narrow", "bfloat16"): "oss-narrow-bfloat16",
    ("hybrid-mamba-next", "float16"): "hybrid-mamba-next-float16",
    ("hybrid-mamba-next", "bfloat16"): "hybrid-mamba-next-bfloat16",
}

#: Pairs whose MTP layers read each other's output.
CHAINED = frozenset(name for name, recipe in RECIPES.items() if isinstance(recipe, StepRecipe))
#: Pairs whose draft has a layer a step, and how many.
DRAFT_LAYERS = {name: recipe.draft_layers for name, recipe in RECIPES.items() if isinstance(recipe, MtpRecipe)}


def on_device(name: str, device: str, dtype: str = "") -> str:
    """The pair that an engine on `device` loads for a scenario that names `name`, where it computes in `dtype`."""
    return MADE_INSTEAD.get((name, device)) or MADE_INSTEAD.get((name, dtype), name)


def pair_of(recipe: Recipe) -> Pair:
    """What a recipe makes, in memory."""
    noise = Noise(recipe.seed)
    pair = KINDS[type(recipe)](noise, recipe)
    return perturbed(noise, pair) if recipe.name in PERTURBED else pair
