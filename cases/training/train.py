"""Trains the byte-level pair of the suite: a small Llama, an EAGLE-3 head and an EAGLE-1 head for it.

`python -m cases.training.train OUT` on a machine with a CUDA device: eight minutes on an H100. The text is Python's own
standard library, which every machine with Python has. What it wrote is kept under cases/trained/; no test runs it.

The target is trained as any language model. Each head is trained against the frozen target on the draft steps it will
be asked for (EAGLE-3, arXiv 2503.01840, section 3.2, "training-time test"): at step s a row reads the head's own output
of the row before, and attends what a chain of s drafts would find in its cache.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from cases import llama_weights
from cases.trained_weights import TrainedEagle3Recipe
from cases.training.model import EPS, Head, Layer, Target
from harness.contract import plain_files

BOS, EOS = 256, 257


def corpus() -> Tensor:
    """The standard library's sources in the order of their names, uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts and p.stat().st_size < 400_000)
    data = b"".join(path.read_bytes() + b"\n\n" for path in files)
    print(f"text: {len(files)} files, {len(data) / 2**20:.1f} MiB of {root.name}", flush=True)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(text: Tensor, *, size: int, length: int, seed: int) -> Iterator[Tensor]:
    """Random windows, int64 [size,length]; an eighth of them begins with BOS."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        at = torch.randint(0, len(text) - length, (size,), generator=draw)
        tokens = text[(at[:, None] + torch.arange(length)).to(text.device)].long()
        tokens[: size // 8, 0] = BOS
        yield tokens


class Trainer:
    """AdamW with a warm-up of 100 steps, then a cosine over the seconds that are given."""

    def __init__(self, model: nn.Module, *, rate: float, seconds: float, label: str) -> None:
        narrow = [p for p in model.parameters() if p.dim() < 2]
        wide = [p for p in model.parameters() if p.dim() >= 2]
        groups = [{"params": wide, "weight_decay": 0.05}, {"params": narrow, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
        self._model, self._rate, self._seconds, self._label = model, rate, seconds, label
        self._began, self.steps = time.monotonic(), 0

    @property
    def used(self) -> float:
        """Share of the seconds that are gone."""
        return (time.monotonic() - self._began) / self._seconds

    def step(self, loss: Tensor) -> None:
        """One update; says every 500 steps where it is."""
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(self.used, 1.0)))
        for group in self._adam.param_groups:
            group["lr"] = self._rate * (self.steps / 100 if self.steps < 100 else cosine)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._adam.step()
        self._adam.zero_grad()
        self.steps += 1
        if self.steps % 500 == 0:
            print(f"{self._label}: step {self.steps}, loss {loss.item():.3f}, {self.used:.0%} of the time", flush=True)


def train_target(shape: TrainedEagle3Recipe, text: Tensor, *, seconds: float) -> Target:
    """A language model of `text`."""
    torch.manual_seed(0)
    device = text.device.type
    target = Target(shape).to(device)
    compiled = torch.compile(target) if device == "cuda" else target
    trainer = Trainer(target, rate=3e-3, seconds=seconds, label="target")
    source = batches(text, size=96, length=513, seed=1)
    while trainer.used < 1:
        tokens = next(source)
        with torch.autocast(device, torch.bfloat16):
            logits, _ = compiled(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        trainer.step(loss)
    print(f"target: {trainer.steps} steps, {loss.item():.3f} nats a byte", flush=True)
    return target


def train_head(target: Target, text: Tensor, *, three: bool, chain: int, seconds: float) -> tuple[Head, list[float]]:
    """The head, and how often each of `chain` steps agreed with the target in the end."""
    torch.manual_seed(1)
    shape, device = target.shape, text.device.type
    counts = torch.bincount(text.long(), minlength=shape.vocab)
    ids = counts.topk(shape.draft_vocab).indices.sort().values
    head = Head(shape, three=three, ids=ids).to(device)
    if three:
        head.lm_head.weight.data.copy_(target.head.weight[ids])
    label = f"EAGLE-{3 if three else 1}"
    trainer = Trainer(head, rate=2e-3, seconds=seconds, label=label)
    source, agreed = batches(text, size=32, length=513, seed=2), [0.0] * chain
    while trainer.used < 1:
        tokens = next(source)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            logits, states = target(tokens)
        loss, hits = chain_loss(head, target, tokens, logits.float(), [one.float() for one in states], chain=chain)
        agreed = [0.98 * old + 0.02 * new for old, new in zip(agreed, hits, strict=True)] if trainer.steps else hits
        trainer.step(loss)
    print(f"{label}: {trainer.steps} steps, agrees with the target {[round(one, 3) for one in agreed]}", flush=True)
    return head, agreed


def chain_loss(
    head: Head, target: Target, tokens: Tensor, logits: Tensor, states: list[Tensor], *, chain: int
) -> tuple[Tensor, list[float]]:
    """tokens [B,T+1], logits [B,T+1,V], states of [B,T+1,h] -> the loss of all steps, and each step's agreement.

    Row t of the head reads the token at t + 1 and stands for the target's row t + 1.
    """
    truth = logits[:, 1:]
    wanted, best = truth[..., head.ids].softmax(-1), truth.argmax(-1)
    embedded = F.embedding(tokens[:, 1:], target.embed.weight)
    hidden = head.start([state[:, :-1] for state in states])
    loss, hits = torch.zeros((), device=tokens.device), list[float]()
    cache: list[tuple[Tensor, Tensor]] = []
    for number in range(chain):
        g = head.step(embedded, hidden, cache)
        own = head.logits(g, target)
        loss = loss - 0.9**number * (wanted * own.log_softmax(-1)).sum(-1)[:, number:].mean()
        if not head.three:  # EAGLE-1 also predicts the target's own state (arXiv 2401.15077, section 3.2)
            loss = loss + 0.5 * F.smooth_l1_loss(g[:, number:], states[-1][:, 1 + number :])
        hits.append((head.ids[own.argmax(-1)] == best)[:, number:].float().mean().item())
        hidden = F.pad(g, (0, 0, 1, 0))[:, :-1]
    return loss, hits


def config(shape: TrainedEagle3Recipe, architecture: str, layers: int) -> dict[str, Any]:
    """A Llama config as Hugging Face writes it."""
    own = {"rms_norm_eps": EPS, "bos_token_id": BOS, "eos_token_id": EOS, "torch_dtype": "float16"}
    return llama_weights.config(shape, layers=layers, architecture=architecture) | own


def write(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """One model folder, numbers in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    kept = {
        name: (value.detach().half() if value.is_floating_point() else value).cpu().contiguous()
        for name, value in sorted(tensors.items())
    }
    file = folder / "model.safetensors"
    save_file(kept, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes private files
    count = sum(value.numel() for value in kept.values())
    print(f"{folder.name}: {count:,} numbers, {file.stat().st_size / 2**20:.2f} MiB", flush=True)


def save(out: Path, target: Target, three: Head, one: Head) -> None:
    """target/, eagle3/ and eagle1/ under `out`, named and laid out as published checkpoints are."""
    shape, ids = target.shape, three.ids
    tensors = {
        "model.embed_tokens.weight": target.embed.weight,
        "model.norm.weight": target.norm,
        "lm_head.weight": target.head.weight,
    }
    for index, layer in enumerate(target.layers):
        assert isinstance(layer, Layer)
        tensors |= layer.named(f"model.layers.{index}.")
    write(out / "target", config(shape, "LlamaForCausalLM", shape.layers), tensors)
    head = {
        "fc.weight": three.fc.weight,
        "midlayer.hidden_norm.weight": three.hidden_norm,
        "norm.weight": three.norm,
        "lm_head.weight": three.lm_head.weight,
        "d2t": ids - torch.arange(len(ids), device=ids.device),
        "t2d": torch.isin(torch.arange(shape.vocab, device=ids.device), ids),
    }
    features = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers)}
    own = {"draft_vocab_size": shape.draft_vocab, "eagle_config": features}
    write(out / "eagle3", config(shape, "LlamaForCausalLMEagle3", 1) | own, head | three.layer.named("midlayer."))
    head = {"fc.weight": one.fc.weight, "fc.bias": one.fc.bias}
    write(out / "eagle1", config(shape, "LlamaForCausalLMEagle", 1), head | one.layer.named("layers.0."))


def expected_length(agreed: list[float]) -> float:
    """Accept length of a chain whose steps agree so often, each given that those before did: 1 + p1 + p1 p2 + …"""
    return 1.0 + sum(math.prod(agreed[: i + 1]) for i in range(len(agreed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=190.0, help="for the target")
    parser.add_argument("--head-seconds", type=float, default=140.0, help="for each head")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    shape, text = TrainedEagle3Recipe(name="trained-eagle3"), corpus().to(options.device)
    target = train_target(shape, text, seconds=options.seconds)
    target.requires_grad_(False)
    for parameter in target.parameters():  # heads are trained for the numbers that are kept
        parameter.data = parameter.data.half().float()
    three, agreed3 = train_head(target, text, three=True, chain=4, seconds=options.head_seconds)
    one, agreed1 = train_head(target, text, three=False, chain=4, seconds=options.head_seconds)
    save(options.out, target, three, one)
    record = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "seconds": {"target": options.seconds, "head": options.head_seconds},
        "shape": asdict(shape),
        "agrees": {"eagle3": agreed3, "eagle1": agreed1},
        "files": {
            path.relative_to(options.out).as_posix(): plain_files.sha256(path)
            for path in sorted(options.out.glob("*/*"))
        },
    }
    (options.out / "trained.json").write_text(json.dumps(record, indent=1) + "\n")
    for label, agreed in (("EAGLE-3", agreed3), ("EAGLE-1", agreed1)):
        print(f"{label}: expected accept length of three steps {expected_length(agreed[:3]):.2f}", flush=True)


if __name__ == "__main__":
    main()
