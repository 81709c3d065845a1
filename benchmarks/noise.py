"""How far sound rows and the mildest wrong ones lie apart under `harness.contract.noise`, by simulation on a CPU.

    python -m benchmarks.noise [--sizes 64x2,512x8,2048x16,4096x32] [--rows 64]

A Llama-shaped stack of random weights, with two columns of the residual stream that carry large values, and an EAGLE-1
head run in float32 (the truth), with every operator rounding (the reference's second run), and as engines do: norms and
activations fused, softmax and rotation in float32 with 16-bit probabilities by blocks, sums of products in several
pieces. Products accumulate in float32 and round once, as tensor cores do. Wrong rows are computed the engine's way with
one defect. Printed, as multiples of the limit: the sound row nearest to it, the least of all neighbours' rows, and the
median of the other kinds of wrong rows: sound ones must lie below 1, wrong ones above.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks._bench import count, ended
from harness.contract.noise import judge_states, measure

HEAVY, HEAVY_COLUMNS, QUIET, VOCAB, THETA = 40.0, 2, 0.3, 512, 5e5
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
Matrices = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Where a set of kernels rounds. dtype None: nowhere. block: keys at a time in attention, 0: all, rounded between.

    pieces: partial sums of a product. fused: norms and activations round once.
    """

    dtype: torch.dtype | None = None
    fused: bool = False
    block: int = 0
    pieces: int = 1

    def round(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype).float()

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        step = -(-x.shape[-1] // self.pieces)
        parts = [x[:, at : at + step] @ weight[:, at : at + step].T for at in range(0, x.shape[-1], step)]
        return self.round(sum(parts[1:], parts[0]))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.round((y if self.fused else self.round(y)) * weight)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        d = x.shape[-1]
        angle = positions[:, None] / THETA ** (torch.arange(0, d, 2) / d)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        one, other = x.chunk(2, -1)
        if self.fused:
            return self.round(torch.cat((one * cos - other * sin, other * cos + one * sin), -1))
        r = self.round
        cos, sin = r(cos), r(sin)
        return r(torch.cat((r(one * cos) - r(other * sin), r(other * cos) + r(one * sin)), -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores, r = torch.einsum("ihd,jhd->hij", q, k), self.round
        if not self.block:
            scores = r(r(scores) * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
            return r(torch.einsum("hij,jhd->ihd", r(scores.softmax(-1)), v))
        scores = (scores * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
        most = torch.full((*scores.shape[:2], 1), -1e30)
        total, mixed = torch.zeros_like(most), torch.zeros(*scores.shape[:2], v.shape[-1])
        for at in range(0, scores.shape[-1], self.block):
            part = scores[:, :, at : at + self.block]
            now = torch.maximum(most, part.amax(-1, keepdim=True).clamp_min(-1e30))
            weight, scale = (part - now).exp(), (most - now).exp()
            total = total * scale + weight.sum(-1, keepdim=True)
            mixed = mixed * scale + torch.einsum("hij,jhd->hid", r(weight), v[at : at + self.block])
            most = now
        return r(mixed / total).transpose(0, 1)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.round((silu(gate) if self.fused else self.round(silu(gate))) * up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An arithmetic, and a defect: its kind and the row it is about."""

    arithmetic: Arithmetic
    defect: str = ""
    row: int = -1


@dataclass(slots=True, kw_only=True)
class Model:
    """Random weights, drawn layer by layer, so that no more than one is in memory."""

    hidden: int
    layers: int
    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(17))

    def __post_init__(self) -> None:
        self.width = min(128 if self.hidden > 2048 else 64, max(16, self.hidden // 4))
        self.heads = self.hidden // self.width
        self.groups = max(1, self.heads // 4)
        self.heavy = torch.randperm(self.hidden, generator=self.generator)[:HEAVY_COLUMNS]

    width: int = 0
    heads: int = 0
    groups: int = 0
    heavy: Tensor = field(default_factory=lambda: torch.zeros(0))

    def draw(self, *shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * std).to(self.dtype).float()

    def norm(self) -> Tensor:
        weight = 1 + self.draw(self.hidden, std=0.2)
        weight[self.heavy] *= 0.05
        return weight.to(self.dtype).float()

    def layer(self, *, heavy: bool) -> Matrices:
        h, inner, wide, narrow = self.hidden, int(2.75 * self.hidden), self.heads * self.width, self.groups * self.width
        down = self.draw(h, inner, std=2 * QUIET / math.sqrt(inner))
        if heavy:
            down[self.heavy] *= HEAVY
        return {
            "q": self.draw(wide, h, std=1.6 / math.sqrt(h)),
            "k": self.draw(narrow, h, std=1.6 / math.sqrt(h)),
            "v": self.draw(narrow, h, std=1 / math.sqrt(h)),
            "o": self.draw(h, wide, std=QUIET / math.sqrt(wide)),
            "gate": self.draw(inner, h, std=1 / math.sqrt(h)),
            "up": self.draw(inner, h, std=1 / math.sqrt(h)),
            "down": down,
            "first": self.norm(),
            "second": self.norm(),
        }

    def forward(self, x: Tensor, w: Matrices, run: Run, *, middle: bool = False, normed: bool = True) -> Tensor:
        """One layer over x [T,h]; middle: whether this is the layer that loses something."""
        a, rows, row = run.arithmetic, len(x), run.row
        places = torch.arange(rows)
        places[row] += run.defect == "position off by one"
        y = a.norm(x, w["first"]) if normed else x
        q = a.rotate(a.product(y, w["q"]).view(rows, self.heads, -1), places)
        k = a.rotate(a.product(y, w["k"]).view(rows, self.groups, -1), places)
        v = a.product(y, w["v"]).view(rows, self.groups, -1)
        if run.defect == "KV slot of the row before":
            k[row], v[row] = k[row - 1].clone(), v[row - 1].clone()
        k, v = (one.repeat_interleave(self.heads // self.groups, 1) for one in (k, v))
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        mask[-1, row] &= run.defect != "mask bit lost"
        added = a.product(a.attend(q, k, v, mask).reshape(rows, -1), w["o"])
        kept = x.clone()
        kept[row] *= not (middle and run.defect == "residual of a layer lost")
        x = a.round(kept + added)
        y = a.norm(x, w["second"])
        inner = a.product(a.activate(a.product(y, w["gate"]), a.product(y, w["up"])), w["down"])
        inner[row] *= not (middle and run.defect == "MLP of a layer lost")
        return a.round(x + inner)


#: Kinds of defect.
DEFECTS = (
    "KV slot of the row before",
    "mask bit lost",
    "position off by one",
    "residual of a layer lost",
    "MLP of a layer lost",
)


def about(defect: str, rows: int) -> int:
    """The row that a defect is about, of so many."""
    return {"position off by one": rows - 2}.get(defect, rows - 1 if "layer" in defect else rows // 2)


def wrong_of(defect: str, rows: int) -> slice:
    """Rows that are wrong by it: all that see the slot, or one."""
    if defect.startswith("KV"):
        return slice(rows // 2 + 1, rows)
    return slice(rows - 2, rows - 1) if "position" in defect else slice(rows - 1, rows)


def runs_of(dtype: torch.dtype, rows: int) -> dict[str, Run]:
    sound = {
        "truth": Arithmetic(),
        "own": Arithmetic(dtype=dtype),
        "blocks of 64": Arithmetic(dtype=dtype, fused=True, block=64),
        "blocks of 16, 8 pieces": Arithmetic(dtype=dtype, fused=True, block=16, pieces=8),
        "fused, 2 pieces": Arithmetic(dtype=dtype, fused=True, pieces=2),
        "4 pieces": Arithmetic(dtype=dtype, pieces=4),
    }
    found = {name: Run(arithmetic=one) for name, one in sound.items()}
    usual = sound["blocks of 64"]
    return found | {name: Run(arithmetic=usual, defect=name, row=about(name, rows)) for name in DEFECTS}


def states_of(hidden: int, layers: int, dtype: torch.dtype, rows: int) -> dict[str, dict[str, Tensor]]:
    """Kind of rows -> run -> states [rows,hidden]."""
    model = Model(hidden=hidden, layers=layers, dtype=dtype)
    runs, embedding = runs_of(dtype, rows), model.draw(VOCAB, hidden, std=1.0)
    tokens = torch.randint(VOCAB, (rows,), generator=model.generator)
    states = dict.fromkeys(runs, embedding[tokens])
    for i in range(layers):
        w = model.layer(heavy=i == 1)
        states = {name: model.forward(states[name], w, run, middle=i == layers // 2) for name, run in runs.items()}
    final = model.norm()
    target = {name: run.arithmetic.norm(states[name], final) for name, run in runs.items()}
    state = model.draw(hidden, hidden, std=QUIET / math.sqrt(hidden))
    join, w = torch.cat((torch.eye(hidden), state), dim=1), model.layer(heavy=False)
    draft = {}
    for name, run in runs.items():
        x = run.arithmetic.product(torch.cat((embedding[tokens.roll(-1)], target[name]), -1), join)
        draft[name] = model.forward(x, w, run, normed=False)
    return {"target": target, "draft": draft}


def compared(states: Mapping[str, Tensor], dtype: str) -> dict[str, float]:
    """Greatest of the sound rows, least of each kind of wrong ones, over their limits; the noise itself."""
    arrays = {name: one.numpy() for name, one in states.items()}
    truth, own, rows = arrays["truth"], arrays["own"], len(arrays["truth"])
    noise = measure(truth, own, rounding=ROUNDING[dtype], tests=1000)

    def over(name: str) -> np.ndarray:
        judged = judge_states(engine=arrays[name], truth=truth, own=own, noise=noise)
        return judged.greatest_abs / judged.limit

    sound = [name for name in arrays if name not in (*DEFECTS, "truth", "own")]
    found = {"noise": noise.typical, "sound": max(float(over(name).max()) for name in sound)}
    arrays["neighbour's row"] = np.roll(arrays["blocks of 64"], 1, axis=0)
    found["neighbour's row"] = float(over("neighbour's row").min())
    return found | {name: float(np.median(over(name)[wrong_of(name, rows)])) for name in DEFECTS}


def _sizes(text: str) -> list[tuple[int, int]]:
    """(hidden, layers) of each of `512x8,2048x16`."""
    found = re.findall(r"(?:^|,)([1-9]\d*)x([1-9]\d*)(?=,|$)", text)
    if len(found) != text.count(",") + 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: hidden x layers, comma-separated, as in 512x8,2048x16")
    return [(int(hidden), int(layers)) for hidden, layers in found]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=_sizes, default="64x2,512x8,2048x16,4096x32")
    parser.add_argument("--rows", type=count, default=64)
    asked = parser.parse_args()
    names = ["noise", "sound", "neighbour's row", *DEFECTS]
    print("| hidden x layers | dtype | rows of | " + " | ".join(names) + " |")
    print("|" + " --- |" * (len(names) + 3))
    for hidden, layers in asked.sizes:
        size = f"{hidden}x{layers}"
        for dtype in ("float16", "bfloat16"):
            start = time.monotonic()
            for kind, states in states_of(hidden, layers, getattr(torch, dtype), asked.rows).items():
                found = compared(states, dtype)
                cells = [f"{found[name]:.1e}" if name == "noise" else f"{found[name]:.2f}" for name in names]
                print(f"| {size} | {dtype} | {kind} | " + " | ".join(cells) + " |", flush=True)
            print(f"{size} {dtype}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    ended(main)
