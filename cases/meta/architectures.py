"""How far the reference is from Hugging Face, for every architecture that both compute: the table of docs/evidence.

    python -m cases.meta.architectures

Random tiny checkpoints over the switches of each family (see cases.meta.published); weights and both computations are
float64, and what Hugging Face does in float32 inside is in the difference.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from cases.meta.published import FAMILIES, HIDDEN, VOCAB, make_target
from cases.meta.published_eagle import HEADS
from cases.meta.published_heads import BEHIND, BESIDE, make_pair
from reference.attention import Sight
from reference.mtp import MtpHead
from reference.pairs import load_pair, paper_target

SEEDS, ROWS = range(4), 70


def main() -> None:
    """A row a family: its target, and its next-token layer where it has one."""
    torch.set_num_threads(1)
    print("| family | what | compared with | dtype | rows | greatest difference | of values up to |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for family in FAMILIES:
        _row(family, "target: every state, logits", "its class", [_target(family, seed) for seed in SEEDS])
        if family in (*BEHIND, *BESIDE):
            theirs = "MtpLayer" if family in BEHIND else "its decoder layer, the join written out"
            _row(family, "next-token layer: state", theirs, [_head(family, seed) for seed in SEEDS])
    for kind in HEADS:
        theirs = "`LlamaDecoderLayer` and `Qwen2DecoderLayer`, the rest written out"
        _row(kind, "head: features, state, logits", theirs, [_eagle(kind, seed) for seed in range(4 * len(SEEDS))])


def _row(family: str, what: str, theirs: str, found: list[tuple[float, float]]) -> None:
    worst, size = (max(one[i] for one in found) for i in (0, 1))
    print(f"| {family} | {what} | {theirs} | float64 | {ROWS * len(found)} | {worst:.1e} | {size:.1f} |")


@torch.no_grad()
def _target(family: str, seed: int) -> tuple[float, float]:
    """The greatest difference of any state or logit, and the greatest value."""
    with tempfile.TemporaryDirectory() as folder:
        hf = make_target(family, seed, Path(folder))
        target = paper_target(Path(folder), torch.float64)
    tokens = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(seed))
    out, states = hf(tokens[None], output_hidden_states=True, use_cache=False), target.hidden_states(tokens)
    pairs = list(zip([*states, target.logits(states[-1])], [*out.hidden_states, out.logits], strict=True))
    return max(_off(mine, other[0]) for mine, other in pairs), max(float(other.abs().max()) for _, other in pairs)


def _head(family: str, seed: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        _, says = make_pair(family, seed, Path(folder))
        _, head = load_pair(Path(folder), Path(folder), torch.float64)
    assert not isinstance(head, MtpHead)
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (ROWS,), generator=source)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=source)
    theirs, (mine, _) = says(tokens, hidden), head.forward(tokens, hidden, torch.arange(ROWS), Sight.causal(ROWS))
    return _off(mine, theirs), float(theirs.abs().max())


@torch.no_grad()
def _eagle(kind: str, seed: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        made = HEADS[kind](seed, Path(folder))
        _, head = load_pair(made.target, made.draft, torch.float64)
    assert not isinstance(head, MtpHead)
    compared = made.beside(head, torch.randint(VOCAB, (ROWS + 1,), generator=torch.Generator().manual_seed(seed)))
    return max(_off(*pair) for pair in compared), max(float(theirs.abs().max()) for _, theirs in compared)


def _off(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max())


if __name__ == "__main__":
    main()
