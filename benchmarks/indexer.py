"""What a sparse attention indexer chooses beside the paper's scores: SGLang alone on a GPU, texts above index_topk.

    .venv/bin/python -m benchmarks.indexer [--engine 0.5.23] [--most 64] [--shared] [--kernel torch] [--seconds 250]
    .venv/bin/python -m benchmarks.indexer --make FOLDER [--most 2048] [--shared]

The target is DeepSeek-V3.2's class with three layers and a NextN layer, 32 index heads of 128, weights in bfloat16.
What each layer chose for each row of a text, in its prompt, its verifies and where the draft catches up, is held
against our scores, which are computed from the tokens alone, behind what the engine chose for the rows and layers
before (`reference.indexer`). SGLang keeps queries and keys in FP8: once more in that, the same scores say how far that
moves them. A row is wrong that chooses another number of rows than it should, a row that it does not see, or one whose
score is below that of one left out by more than FP8 can make of them. As a control, the choice of the row before, which
must be found wrong. --make writes the target's folder, for `eaglecheck run --target FOLDER`, and nothing else.

Exits 1 if a row is wrong or the control is not, 3 if SGLang does not run or nothing was recorded.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._bench import ended
from cases.families import FAMILIES
from cases.fixed import DRAIN, submit
from cases.sparse_weights import RECIPE, written
from harness.both_sides import leases
from harness.contract.outputs import writable
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.engines import envs
from harness.engines.bare import Bare, run_bare
from harness.engines.launch import build_launch
from reference.attention import Sight
from reference.indexer import Indexer
from reference.mla import SparseAttention
from reference.model import PaperTarget
from reference.nextn import NextNHead
from reference.pairs import load_pair
from reference.routing_ties import Watch, watched

#: Prompts, of which the first are longer than what is chosen.
LENGTHS = {64: (300, 150, 61, 40), 2048: (2500, 2200, 300)}
NEW = 16
#: SGLang's arguments for one way to take the best; the other is its default, which knows 2,048 alone.
TORCH = {"dsa_topk_backend": "torch", "speculative_dsa_topk_backend": "torch"}
#: The largest number in FP8 (E4M3).
LARGEST = 448.0
SAID = 60


def asked(most: int, kernel: str) -> Scenario:
    """Each prompt alone."""
    base, draw = FAMILIES["paged"].scenarios[0], random.Random(5)
    requests = [
        base.requests[0].model_copy(
            update={
                "rid": f"text{place}",
                "input_ids": tuple(draw.randrange(RECIPE.vocab) for _ in range(length)),
                "max_new_tokens": NEW,
            }
        )
        for place, length in enumerate(LENGTHS[most])
    ]
    engine = EngineConfig(
        attention_backend="dsa",
        page_size=64,
        dtype="bfloat16",
        context_length=RECIPE.max_position,
        max_total_tokens=8192,
        chunked_prefill_size=1024 if most == 2048 else 128,
        radix_cache=False,
        overlap_schedule=False,
        server_args={"dsa_prefill_backend": "triton_sparse_mla", **(TORCH if kernel == "torch" else {})},
    )
    script = [op for one in requests for op in (submit(one.rid), DRAIN, Op(kind="flush"))]
    return base.model_copy(update={"requests": tuple(requests), "engine": engine, "wants": (), "script": tuple(script)})


def fared(folder: Path, scenario: Scenario, args: argparse.Namespace) -> Bare:
    """How SGLang alone fares; what was chosen lies in the folder's parent then."""
    env, where = envs.ensure(args.engine, print), folder.parent
    spec = SpecConfig(algorithm="EAGLE")
    launch = build_launch(
        env=env, spec=spec, engine=scenario.engine, target=folder, draft=folder, device="cuda", lease=leases.request()
    )
    switch = {"SGLANG_DSA_FUSE_TOPK": "0"} if args.kernel == "torch" else {}
    boot = launch.boot | {"environment": launch.boot["environment"] | switch, "chosen": str(where)}
    found = run_bare(replace(launch, boot=boot), scenario, folder=where, seconds=args.seconds)
    if found.texts is None:
        print(*(where / "bare.log").read_text(errors="replace").splitlines()[-SAID:], sep="\n")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """See harness.engine_side.probes.index_probe."""

    layer: int
    mode: str
    tokens: Sequence[int]
    positions: Sequence[int]
    left: Sequence[Sequence[int]]
    wrong: Sequence[int]


def calls(folder: Path, layers: Mapping[float, int]) -> Iterator[Call]:
    """What was recorded, in order. layers: the sum of a layer's query weights -> its number."""
    for file in sorted(folder.glob("chosen-*.jsonl")):
        for line in file.read_text().splitlines():
            said = json.loads(line)
            queries = said.pop("queries")
            nearest = min(layers, key=lambda one: abs(one - queries))
            yield Call(layer=layers[nearest], **said)


@dataclass(slots=True)
class Choices:
    """Of one text: by layer and position the positions that were left out, and how many places were wrong."""

    left: dict[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    wrong: dict[tuple[int, int], int] = field(default_factory=dict)

    def take(self, call: Call, text: Sequence[int], *, drafts: bool) -> None:
        """Rows of a forward that are the text's: up to the first that is fed another token. A draft's row at position p
        is fed the token at p + 1. Nothing of a call that chose nothing."""
        if not call.left:
            return
        for token, position, left, wrong in zip(call.tokens, call.positions, call.left, call.wrong, strict=True):
            at = position + drafts
            if at >= len(text) or text[at] != token:
                return
            self.left[call.layer, position], self.wrong[call.layer, position] = left, wrong


def gathered(found: Iterator[Call], texts: Sequence[Sequence[int]], draft: int) -> list[Choices]:
    """Of each text, which were asked one after another; draft: number of the draft's layer. Draft steps, whose rows
    are nobody's text, are left out."""
    choices, number = [Choices() for _ in texts], -1
    for call in found:
        number += call.mode == "EXTEND" and call.positions[0] == 0 and call.layer == 0
        if 0 <= number < len(texts) and call.mode != "DECODE":
            choices[number].take(call, texts[number], drafts=call.layer == draft)
    return choices


class Rounding(Indexer):
    """The same with queries and keys rounded to FP8, one scale a row, as SGLang keeps them."""

    def __init__(self, plain: Indexer) -> None:
        self.__dict__ |= plain.__dict__

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        """See Indexer.keys."""
        return rounded(super().keys(x, positions))

    def queries_of(self, asking: Tensor, positions: Tensor) -> Tensor:
        """See Indexer.queries_of."""
        return rounded(super().queries_of(asking, positions))


def rounded(x: Tensor) -> Tensor:
    """x [...,d] in FP8 and back."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


@dataclass(slots=True)
class Following:
    """Makes the reference's layers attend what an engine's chose, and keeps their scores (`routing_ties.Watch`)."""

    choices: Choices
    layers: Mapping[int, int]  # id of an indexer -> layer
    values: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, router: object, values: Tensor, chosen: Tensor) -> Tensor:
        """See Watch."""
        layer = self.layers[id(router)]
        self.values[layer], chosen = values, chosen.clone()
        for row in range(len(values)):
            left = self.choices.left.get((layer, row))
            if left is not None:
                kept = torch.ones(row + 1, dtype=torch.bool)
                kept[list(left)] = False
                places = kept.nonzero()[:, 0]
                chosen[row] = row if not len(places) else places[torch.arange(chosen.shape[1]) % len(places)]
        return chosen


@dataclass(slots=True)
class Judged:
    """Of one layer. gap: the largest by which a score left out is above one taken, as a share of what FP8 can make."""

    rows: int = 0
    above: int = 0  # that see more than is chosen
    wrong: list[str] = field(default_factory=list)
    others: int = 0  # rows that choose otherwise than the best by our scores
    gap: float = 0.0
    control: int = 0  # rows of those above of which the choice of the row before is found wrong


def judge(
    target: PaperTarget, head: NextNHead, text: Sequence[int], choices: Choices, most: int, judged: Mapping[int, Judged]
) -> None:
    """Every recorded row of a text, into `judged` by layer."""
    exact = followed(target, head, text, choices)
    with in_fp8(target, head):
        coarse = followed(target, head, text, choices)
    for (layer, row), left in sorted(choices.left.items()):
        into, sees = judged[layer], row + 1
        into.rows += 1
        number = sees - len(left)
        if choices.wrong[layer, row] or number != min(most, sees):
            into.wrong.append(f"row {row}: {number} of {sees} rows, {choices.wrong[layer, row]} places wrong")
        if sees <= most or layer not in exact:
            continue
        into.above += 1
        scores, other = exact[layer][row, :sees], coarse[layer][row, :sees]
        allowed = 2 * float((scores - other).abs().max())
        gap = gap_of(other, left)
        into.gap = max(into.gap, gap / allowed)
        into.others += gap > 0
        if gap > allowed:
            into.wrong.append(f"row {row}: a score left out is {gap:.3g} above one taken, {allowed:.3g} allowed")
        before = choices.left.get((layer, row - 1))
        if before is not None:
            into.control += gap_of(other, [*before, row][: len(left)]) > allowed


def gap_of(scores: Tensor, left: Sequence[int]) -> float:
    """scores [s], of which those at `left` were not taken: by how much the best of these is above the worst taken."""
    out = torch.zeros(len(scores), dtype=torch.bool)
    out[list(left)] = True
    return float(scores[out].max() - scores[~out].min())


def sparse_layers(target: PaperTarget, head: NextNHead) -> list[SparseAttention]:
    """The target's, then the draft's."""
    return [layer.attention for layer in (*target.stack, head.layer)]  # type: ignore[attr-defined]


@contextmanager
def in_fp8(target: PaperTarget, head: NextNHead) -> Iterator[None]:
    """Their indexers round."""
    layers = sparse_layers(target, head)
    plain = [one.indexer for one in layers]
    try:
        for one in layers:
            one.indexer = Rounding(one.indexer)
        yield
    finally:
        for one, indexer in zip(layers, plain, strict=True):
            one.indexer = indexer


def followed(target: PaperTarget, head: NextNHead, text: Sequence[int], choices: Choices) -> dict[int, Tensor]:
    """By layer the scores [T,T] of a text's rows, behind an engine's choices."""
    layers = {id(one.indexer): layer for layer, one in enumerate(sparse_layers(target, head))}
    following = Following(choices, layers)
    run(target, head, text, following)
    return following.values


def run(target: PaperTarget, head: NextNHead, text: Sequence[int], following: Watch) -> None:
    """Target and draft over a text, each in one forward."""
    with torch.inference_mode(), watched(following):
        states = target.forward(text[:-1])
        rows = torch.arange(len(text) - 1)
        head.forward(torch.tensor(text[1:]), states, rows, Sight.causal(len(rows)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="0.5.23")
    parser.add_argument("--most", type=int, default=64, choices=sorted(LENGTHS), help="rows that a row attends")
    parser.add_argument("--shared", action="store_true", help="draft steps share one choice")
    parser.add_argument("--kernel", default="torch", choices=("torch", "sgl"), help="which takes the best")
    parser.add_argument("--seconds", type=float, default=250.0)
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.make is not None:
        print(written(writable(args.make, option="make"), args.most, shared=args.shared))
        return 0
    with tempfile.TemporaryDirectory(prefix="eaglecheck-indexer-") as root:
        folder, scenario = written(Path(root) / "target", args.most, shared=args.shared), asked(args.most, args.kernel)
        found = fared(folder, scenario, args)
        if found.texts is None:
            print(f"no verdict: {found.why} {found.sites}")
            return 3
        print(f"verifies {found.verifies}, texts of {[len(text) for text in found.texts]} tokens")
        texts = [(*one.input_ids, *text) for one, text in zip(scenario.requests, found.texts, strict=True)]
        return said(folder, texts, args.most)


def said(folder: Path, texts: Sequence[Sequence[int]], most: int) -> int:
    """Judges what lies beside the target's folder, and prints a line a layer."""
    target, head = load_pair(folder, folder, torch.float32)
    assert isinstance(target, PaperTarget)
    assert isinstance(head, NextNHead)
    indexers = [one.indexer for one in sparse_layers(target, head)]
    layers = {float(one.queries.double().sum()): layer for layer, one in enumerate(indexers)}
    judged = {layer: Judged() for layer in layers.values()}
    for text, choices in zip(texts, gathered(calls(folder.parent, layers), texts, len(layers) - 1), strict=True):
        judge(target, head, text, choices, most, judged)
    for layer, one in judged.items():
        name = f"layer {layer}" if layer < len(layers) - 1 else "draft"
        print(
            f"{name}: {one.rows} rows, {one.above} of them above {most}; {len(one.wrong)} wrong, {one.others} choose "
            f"otherwise, at most {one.gap:.2f} of what FP8 can make; control found {one.control}"
        )
        print(*(f"  {line}" for line in one.wrong[:5]), sep="\n", end="\n" if one.wrong else "")
    if not all(one.above for one in judged.values()):
        return 3
    return int(any(one.wrong or not one.control for one in judged.values()))


if __name__ == "__main__":
    ended(main)
