"""Images beside an EAGLE-3 draft: SGLang alone, each prompt as text and with rows of its own embedding as images.

    .venv/bin/python -m benchmarks.images [--engine 0.5.23] [--device cuda] [--chunk 512] [--seconds 250]

The target is Qwen2.5-VL's class around the trained EAGLE-3 pair's target (Llama's arithmetic: biases of zero, turned
by three equal positions) and a vision tower that nothing runs: an image is sent as what the tower would have made of
it (`precomputed_embedding`), one place wide, so that positions are those of text. What is sent is the target's own
embedding of the tokens in whose place it stands. So texts are to be those of the plain prompts, and the draft, which
gets these rows by way of `mm_input_embeds`, is to need as many verifies. Exits 1 if any differs, 3 if SGLang does not
run. SGLang's processor wants torchvision, which releases on a CPU have not here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks._bench import count, ended
from cases.families import FAMILIES
from cases.fixed import DRAIN, submit
from cases.pairs import RECIPES, pair_of
from cases.recipes import Weights
from harness.both_sides import leases
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig
from harness.engines import envs
from harness.engines.bare import Bare, run_bare
from harness.engines.launch import build_launch

CHECKPOINT = "trained-eagle3"
#: Places of each prompt that are images: some, most, one, and the rest of a prompt.
SEEN = (range(10, 40), range(40, 130), range(5, 6), range(20, 66))
#: Behind which token an image begins and ends, what stands for it, and what for a video.
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
#: Of the tower that nothing runs, and how many of its patches make one place.
WIDTH, PATCH, MERGED = 32, 14, 2
SAID = 200


def tower(hidden: int) -> Weights:
    """A vision tower of one layer, zeros but for its norms."""
    block, inner = "visual.blocks.0.", 2 * WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "visual.patch_embed.proj.weight": (WIDTH, 3, 2, PATCH, PATCH),
        f"{block}attn.qkv.weight": (3 * WIDTH, WIDTH),
        f"{block}attn.qkv.bias": (3 * WIDTH,),
        f"{block}attn.proj.weight": (WIDTH, WIDTH),
        f"{block}attn.proj.bias": (WIDTH,),
        "visual.merger.mlp.0.weight": (MERGED**2 * WIDTH, MERGED**2 * WIDTH),
        "visual.merger.mlp.0.bias": (MERGED**2 * WIDTH,),
        "visual.merger.mlp.2.weight": (hidden, MERGED**2 * WIDTH),
        "visual.merger.mlp.2.bias": (hidden,),
    }
    for name, shape in (("gate_proj", (inner, WIDTH)), ("up_proj", (inner, WIDTH)), ("down_proj", (WIDTH, inner))):
        shapes |= {f"{block}mlp.{name}.weight": shape, f"{block}mlp.{name}.bias": shape[:1]}
    norms = (f"{block}norm1.weight", f"{block}norm2.weight", "visual.merger.ln_q.weight")
    zeros = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    return zeros | {name: np.ones(WIDTH, dtype=np.float32) for name in norms}


def target_of(weights: Weights, plain: Mapping[str, Any]) -> tuple[Weights, dict[str, Any]]:
    """Qwen2.5-VL's weights and config around those of a Llama."""
    heads, width = plain["num_attention_heads"], plain["head_dim"]
    sizes = {"q": heads * width, "k": plain["num_key_value_heads"] * width, "v": plain["num_key_value_heads"] * width}
    biases = {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": np.zeros(size, dtype=np.float32)
        for layer in range(plain["num_hidden_layers"])
        for name, size in sizes.items()
    }
    first = plain["vocab_size"] - len(TOKENS)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    pairs = width // 2  # of which each position turns some
    config = {name: value for name, value in plain.items() if name not in ("attention_bias", "mlp_bias")} | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]},
        "use_sliding_window": False,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 1,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_heads": 2,
            "in_chans": 3,
            "patch_size": PATCH,
            "spatial_patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "out_hidden_size": plain["hidden_size"],
            "fullatt_block_indexes": [0],
            "hidden_act": "silu",
        },
        **{name: first + place for place, name in enumerate(names)},
    }
    return weights | biases | tower(plain["hidden_size"]), config


def processor_files(vocab: int) -> dict[str, Any]:
    """What Hugging Face makes a processor from: a word a token, and sizes of patches."""
    first = vocab - len(TOKENS)
    words = {f"w{number}": number for number in range(first)} | {word: first + i for i, word in enumerate(TOKENS)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [{"id": words[word], "content": word, **flags} for word in TOKENS],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    sizes = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGED,
        "processor_class": "Qwen2_5_VLProcessor",
    }
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "additional_special_tokens": list(TOKENS),
            "image_token": TOKENS[2],
            "video_token": TOKENS[3],
        },
        "preprocessor_config.json": sizes | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": sizes | {"video_processor_type": "Qwen2VLVideoProcessor"},
    }


def written(folder: Path) -> tuple[Path, Path, np.ndarray[Any, Any]]:
    """Folders of target and draft, and the target's embedding [V,h]."""
    pair = pair_of(RECIPES[CHECKPOINT])
    both = {"target": target_of(pair.target, pair.target_config), "draft": (pair.draft, pair.draft_config)}
    for name, (weights, config) in both.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(
            {one: np.ascontiguousarray(value) for one, value in weights.items()}, folder / name / "model.safetensors"
        )
    for name, content in processor_files(pair.target_config["vocab_size"]).items():
        (folder / "target" / name).write_text(json.dumps(content))
    return folder / "target", folder / "draft", pair.target["model.embed_tokens.weight"].astype(np.float32)


def asked(chunk: int) -> Scenario:
    """Each prompt as text, each with images, then all of both at once."""
    own = [one for one in FAMILIES["trained"].scenarios if one.checkpoint == CHECKPOINT]
    prompts = list({one.input_ids: one for scenario in own for one in scenario.requests}.values())[: len(SEEN)]
    # those with images first: of a list that begins with none SGLang wraps each one's images twice (`io_struct.py`)
    names = [f"{what}{place}" for what in ("text", "image", "imageall", "textall") for place in range(len(SEEN))]
    requests = [prompts[place % len(SEEN)].model_copy(update={"rid": name}) for place, name in enumerate(names)]
    half = 2 * len(SEEN)
    script = [op for name in names[:half] for op in (submit(name), Op(kind="flush"))]
    return own[0].model_copy(
        update={
            "requests": tuple(requests),
            "script": (*script, submit(*names[half:]), DRAIN),
            "engine": EngineConfig(overlap_schedule=False, radix_cache=False, chunked_prefill_size=chunk),
            "wants": (),
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="0.5.23")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--chunk", type=count, default=512, help="prompt tokens a batch; fewer end within images")
    parser.add_argument("--seconds", type=float, default=250.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eaglecheck-images-") as root:
        found = fared(args, Path(root))
    if found.texts is None:
        print(f"no verdict: {found.why} {found.sites}")
        return 3
    each = len(SEEN)
    for what, *places in (("alone", 0, each), ("together", 3 * each, 2 * each)):
        text, image = (slice(start, start + each) for start in places)
        same = sum(a == b for a, b in zip(found.texts[text], found.texts[image], strict=True))
        print(
            f"{what}: texts equal {same} of {each}; "
            f"verifies {found.verifies[text]} as text, {found.verifies[image]} as images"
        )
    both = [(*found.texts[i : i + each], *found.verifies[i : i + each]) for i in range(0, 4 * each, each)]
    return int(both[0] != both[1] or both[2] != both[3])


def fared(args: argparse.Namespace, root: Path) -> Bare:
    """How SGLang alone fares with all of them."""
    target, draft, embedding = written(root)
    scenario = asked(args.chunk)
    image = json.loads((target / "config.json").read_text())["image_token_id"]
    rows: list[list[list[float]] | None] = []
    requests = []
    for place, one in enumerate(scenario.requests):
        seen = SEEN[place % len(SEEN)] if one.rid.startswith("image") else ()
        ids = tuple(image if at in seen else token for at, token in enumerate(one.input_ids))
        rows.append(embedding[[one.input_ids[at] for at in seen]].tolist() if seen else None)
        requests.append(one.model_copy(update={"input_ids": ids}))
    scenario = scenario.model_copy(update={"requests": tuple(requests)})
    env, engine = envs.ensure(args.engine, print), scenario.engine
    launch = build_launch(
        env=env,
        spec=scenario.spec,
        engine=engine,
        target=target,
        draft=draft,
        device=args.device,
        lease=leases.request() if args.device == "cuda" else None,
    )
    launch = replace(
        launch, boot=launch.boot | {"arguments": launch.boot["arguments"] | {"chunked_prefill_size": args.chunk}}
    )
    found = run_bare(launch, scenario, folder=root, seconds=args.seconds, images=rows)
    if found.texts is None:
        print(*(root / "bare.log").read_text(errors="replace").splitlines()[-SAID:], sep="\n")
    return found


if __name__ == "__main__":
    ended(main)
