"""Writes pairs in the shape of published ones, at their real size, with random weights; seeded, seconds on a card.

    python -m benchmarks.make_real_size FOLDER [--only llama-1b,qwen3-4b,llama-8b] [--device cuda] [--plain]

Numbers of the configs are those of Llama-3.2-1B (with an EAGLE-1 head), Qwen3-4B and Llama-3.1-8B (with EAGLE-3 heads
of 32,000 tokens), vocabulary and ties of embeddings too. Random weights neither agree nor repeat, so a few things are
arranged: the row of a token's usual successor in the output leans towards that token's embedding (itself, where
embedding and output are one), layers add little to it, and a draft passes its token on. Two columns of the residual
stream carry large values from the second layer on, as in trained models. --plain: no rotation of Llama 3.1's kind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks._bench import ended, listed
from cases import llama_weights
from cases.recipes import Recipe
from harness.both_sides import gpus, leases
from harness.contract.outputs import writable

#: The logit of the usual successor, the same where a token follows itself, and how random logits spread.
LEAN, TIED_LEAN, SPREAD = 24.0, 14.0, 3.0
#: Size of what all layers add to the residual stream together, over the size of the embedding.
ADDED = 1.5
#: What large columns are of the others, and how many there are; norms bring them down again.
HEAVY, HEAVY_COLUMNS, BROUGHT_DOWN = 40.0, 2, 0.05
#: GiB of a card that making a pair takes: embedding and output of the largest, in float32, and what is drawn for them.
TAKES = 18.0
#: Bytes of a weight file.
SHARD = 4 << 30
DRAFT_VOCAB = 32000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Recipe):
    """A published target and the kind of its head. tied: whether embedding and output are one."""

    seed: int = 0
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    rope_theta: float = 500000.0
    max_position: int = 131072
    eps: float = 1e-5
    tied: bool = False
    eagle3: bool = True
    rotation: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Shape(Shape):
    """The same of a Qwen3."""

    target_architecture: ClassVar[str] = "Qwen3ForCausalLM"
    target_type: ClassVar[str] = "qwen3"


LLAMA3 = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"rope_type": "llama3"}  # type: ignore[dict-item]
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="llama-1b",
            vocab=128256,
            hidden=2048,
            intermediate=8192,
            layers=16,
            head_dim=64,
            tied=True,
            eagle3=False,
            rotation={**LLAMA3, "factor": 32.0},
        ),
        Qwen3Shape(
            name="qwen3-4b",
            vocab=151936,
            hidden=2560,
            intermediate=9728,
            layers=36,
            rope_theta=1000000.0,
            max_position=40960,
            eps=1e-6,
            tied=True,
        ),
        Shape(
            name="llama-8b",
            vocab=128256,
            hidden=4096,
            intermediate=14336,
            layers=32,
            rotation={**LLAMA3, "factor": 8.0},
        ),
    )
}


def config(shape: Shape, *, plain: bool = False) -> dict[str, Any]:
    """config.json of the target."""
    return llama_weights.config(shape, layers=shape.layers) | {
        "bos_token_id": shape.vocab - 3,
        "eos_token_id": shape.vocab - 1,  # nothing leans towards it
        "rms_norm_eps": shape.eps,
        "rope_scaling": None if plain else shape.rotation,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        **({"use_sliding_window": False} if isinstance(shape, Qwen3Shape) else {}),
    }


def draft_config(shape: Shape, architecture: str) -> dict[str, Any]:
    """What both kinds of heads have in common: one layer, no scaled rotation."""
    own = {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1, "rope_scaling": None}
    return config(shape) | own


class Writer:
    """Draws tensors on a device, in bfloat16, and writes them to a folder in files of at most SHARD bytes."""

    def __init__(self, folder: Path, *, seed: int, device: str) -> None:
        self.folder, self.device = folder, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self._now: dict[str, Tensor] = {}
        self._where: dict[str, str] = {}
        folder.mkdir(parents=True)

    def random(self, *shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device) * std

    def put(self, name: str, value: Tensor) -> None:
        size = sum(one.numel() * one.element_size() for one in self._now.values())
        if size + 2 * value.numel() > SHARD:
            self._flush()
        kept = value if value.dtype in (torch.int64, torch.bool) else value.to(torch.bfloat16)
        self._now[name] = kept.contiguous().cpu()

    def _flush(self) -> None:
        file = f"model-{len(set(self._where.values())) + 1:05d}.safetensors"
        save_file(self._now, self.folder / file, metadata={"format": "pt"})
        self._where |= dict.fromkeys(self._now, file)
        self._now = {}

    def finish(self, settings: dict[str, Any]) -> None:
        self._flush()
        files = set(self._where.values())
        if len(files) == 1:
            (self.folder / files.pop()).rename(self.folder / "model.safetensors")
        else:
            index = {"metadata": {}, "weight_map": self._where}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (self.folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def layer(
    to: Writer, prefix: str, shape: Shape, *, gain: float, heavy: Tensor | None, width: int | None = None
) -> None:
    """One decoder layer. gain: how much it adds; heavy: columns with large values; width: what attention reads."""
    h, wide, narrow = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    read, qwen = width or h, isinstance(shape, Qwen3Shape) and width is None
    sharp = 1.6 / math.sqrt(read)
    to.put(f"{prefix}self_attn.q_proj.weight", to.random(wide, read, std=sharp))
    to.put(f"{prefix}self_attn.k_proj.weight", to.random(narrow, read, std=sharp))
    to.put(f"{prefix}self_attn.v_proj.weight", to.random(narrow, read, std=1 / math.sqrt(read)))
    to.put(f"{prefix}self_attn.o_proj.weight", to.random(h, wide, std=gain / math.sqrt(wide)))
    for name in ("q_norm", "k_norm") if qwen else ():
        to.put(f"{prefix}self_attn.{name}.weight", 1.3 + to.random(shape.head_dim, std=0.2))
    to.put(f"{prefix}mlp.gate_proj.weight", to.random(shape.intermediate, h, std=1 / math.sqrt(h)))
    to.put(f"{prefix}mlp.up_proj.weight", to.random(shape.intermediate, h, std=1 / math.sqrt(h)))
    down = to.random(h, shape.intermediate, std=2 * gain / math.sqrt(shape.intermediate))
    if heavy is not None and prefix.endswith(".1."):
        down[heavy] *= HEAVY
    to.put(f"{prefix}mlp.down_proj.weight", down)
    for name in ("input_layernorm", "post_attention_layernorm"):
        to.put(f"{prefix}{name}.weight", _norm(to, h, heavy))


def _norm(to: Writer, width: int, heavy: Tensor | None) -> Tensor:
    weight = 1 + to.random(width, std=0.2)
    if heavy is not None:
        weight[heavy] *= BROUGHT_DOWN
    return weight


def draft_ids(shape: Shape, generator: torch.Generator) -> Tensor:
    """Ids of a draft vocabulary, ascending: low ones, which prompts are made of, and others by chance."""
    low = min(4096, shape.vocab // 8)
    count = min(DRAFT_VOCAB, shape.vocab // 4) - low
    more = torch.randperm(shape.vocab - low - 8, generator=generator, device=generator.device)[:count] + low
    return torch.cat((torch.arange(low, device=generator.device), more.sort().values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What a head needs of its target. unit: size of an embedding's elements."""

    embedding: Tensor
    output: Tensor
    ids: Tensor
    unit: float


def target(folder: Path, shape: Shape, *, seed: int, device: str, plain: bool) -> Ends:
    """Writes the target. A token's successor is one of the draft vocabulary."""
    to = Writer(folder, seed=seed, device=device)
    h = shape.hidden
    ids = draft_ids(shape, to.generator)
    heavy = torch.randperm(h, generator=to.generator, device=device)[:HEAVY_COLUMNS]
    unit = SPREAD / math.sqrt(h) if shape.tied else 1.0
    embedding = to.random(shape.vocab, h, std=unit)
    # what layers add, so that the token's part of a normed state gives a logit of LEAN
    added = unit * (math.sqrt((SPREAD * math.sqrt(h) / TIED_LEAN) ** 2 - 1) if shape.tied else ADDED)
    output = embedding
    if shape.tied:
        quiet = torch.full((shape.vocab, 1), 0.5, device=device)
        quiet[ids] = 1.0
        embedding *= quiet
    else:
        output = to.random(shape.vocab, h, std=SPREAD / math.sqrt(h))
        after = ids[torch.randint(len(ids), (shape.vocab,), generator=to.generator, device=device)]
        output.index_add_(0, after, embedding * (LEAN * math.sqrt(1 + ADDED**2) / h / unit))
        to.put("lm_head.weight", output)
    to.put("model.embed_tokens.weight", embedding)
    for i in range(shape.layers):
        layer(to, f"model.layers.{i}.", shape, gain=added / math.sqrt(2 * shape.layers), heavy=heavy)
    to.put("model.norm.weight", _norm(to, h, heavy))
    to.finish(config(shape, plain=plain))
    return Ends(embedding=embedding, output=output, ids=ids, unit=unit)


def eagle1(folder: Path, shape: Shape, ends: Ends, *, seed: int, device: str) -> None:
    """An EAGLE-1 head: its output is not normed, and about as large as a state of the target."""
    to, h = Writer(folder, seed=seed, device=device), shape.hidden
    token = 0.5 / ends.unit
    to.put(
        "fc.weight", torch.cat((token * torch.eye(h, device=device), to.random(h, h, std=0.5 / math.sqrt(h))), dim=1)
    )
    # SGLang makes a bias for a head that has none, and leaves in it what happens to be there
    to.put("fc.bias", to.random(h, std=0.05))
    layer(to, "layers.0.", shape, gain=0.3, heavy=None)
    to._now.pop("layers.0.input_layernorm.weight")
    to.put("embed_tokens.weight", ends.embedding)
    settings = draft_config(shape, "LlamaForCausalLMEagle")
    # SGLang deletes the head of a draft that ties its embeddings twice, and does not boot
    to.finish(settings | {"bias": False, "tie_word_embeddings": False})


def eagle3(folder: Path, shape: Shape, ends: Ends, *, seed: int, device: str) -> None:
    """An EAGLE-3 head: attention reads its own row's token and hands it on as far as its key heads are wide."""
    to, h = Writer(folder, seed=seed, device=device), shape.hidden
    heads, groups, d = shape.heads, shape.kv_heads, shape.head_dim
    width, each = groups * d, heads // groups
    layer(to, "midlayer.", shape, gain=0.3, heavy=None, width=2 * h)
    to.put("midlayer.hidden_norm.weight", _norm(to, h, None))
    read = to.random(groups, d, h, std=2.0 / math.sqrt(h))
    basis = torch.linalg.qr(to.random(h, min(width, h), std=1.0))[0]
    basis = torch.cat((basis, torch.zeros(h, width - basis.shape[1], device=device)), dim=1)
    rest = [to.random(rows, h, std=0.1 / math.sqrt(h)) for rows in (width, heads * d, width)]
    to.put("midlayer.self_attn.k_proj.weight", torch.cat((read.reshape(width, h), rest[0]), dim=1))
    asked = read.repeat_interleave(each, 0).reshape(heads * d, h)
    to.put("midlayer.self_attn.q_proj.weight", torch.cat((asked, rest[1]), dim=1))
    to.put("midlayer.self_attn.v_proj.weight", torch.cat((basis.T, rest[2]), dim=1))
    out = basis.reshape(h, groups, 1, d).expand(h, groups, each, d).reshape(h, heads * d) / each
    to.put("midlayer.self_attn.o_proj.weight", out * max(1.0, math.sqrt(h / width)))
    to.put("fc.weight", to.random(h, 3 * h, std=0.15 / math.sqrt(3 * h)))
    to.put("norm.weight", _norm(to, h, None))
    to.put("lm_head.weight", ends.output[ends.ids])
    to.put("d2t", ends.ids - torch.arange(len(ends.ids), device=device))
    proposable = torch.zeros(shape.vocab, dtype=torch.bool, device=device)
    proposable[ends.ids] = True
    to.put("t2d", proposable)
    settings = draft_config(shape, "LlamaForCausalLMEagle3")
    to.finish(settings | {"draft_vocab_size": len(ends.ids), "tie_word_embeddings": False})


def make(name: str, root: Path, *, seed: int, device: str, plain: bool = False, shape: Shape | None = None) -> Path:
    """The folder ROOT/NAME with target/ and draft/, made if it is not there."""
    place, shape = root / name, shape or SHAPES[name]
    if not (place / "DONE").exists():
        ends = target(place / "target", shape, seed=seed, device=device, plain=plain)
        (eagle3 if shape.eagle3 else eagle1)(place / "draft", shape, ends, seed=seed + 1, device=device)
        (place / "DONE").touch()
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--only", type=listed(SHAPES), default=[*SHAPES])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--plain", action="store_true")
    asked = parser.parse_args()
    if asked.device == "cuda":  # engines refuse a card on which somebody works without a lease
        lease = leases.take(leases.request(TAKES), say=lambda text: print(text, flush=True))
        os.environ[gpus.VISIBLE] = lease.card.uuid
    writable(asked.root, option="root")
    for name in asked.only:
        start = time.monotonic()
        place = make(name, asked.root, seed=asked.seed, device=asked.device, plain=asked.plain)
        size = sum(file.stat().st_size for file in place.rglob("*.safetensors"))
        print(f"{place}: {size / 1e9:.1f} GB in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    ended(main)
