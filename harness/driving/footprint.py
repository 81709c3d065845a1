"""How much memory the reference takes, from what files and scenarios show: said before anything is loaded, then kept.

Weights once, in the dtype that the engine holds; the rows kept of every request of a scenario, in float32; and the work
on the longest one: a matrix cast at a time, a block of scores, logits. This module must not import torch by itself.

Symbols: T rows of the longest request, h hidden width, H heads, d width of a key or value, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.settings import SpecConfig
from harness.driving.checkpoint_files import CheckpointFiles

#: Bytes a value of a dtype takes.
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
WIDE = BYTES["float32"]
#: Allocators keep blocks that are not exactly as large as what is in them.
ROUNDED_UP = 1.05
#: Masks, positions, rows on their way to the disk: what is too small to be told apart.
SMALL_MIB = 16
#: On a GPU PyTorch's allocator also counts the workspace of matrix products (32 MiB on Hopper).
WORKSPACE_MIB = 32
#: What PyTorch keeps on a GPU beside tensors: the context.
CONTEXT_MIB = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes at most: of weights, of rows kept of one scenario's requests, and of what a forward works with."""

    weights: int
    kept: int
    work: int

    @property
    def mib(self) -> int:
        return math.ceil((self.weights + self.kept + self.work) * ROUNDED_UP / 2**20) + SMALL_MIB

    def __str__(self) -> str:
        parts = (f"{name} {_gib(getattr(self, name))}" for name in ("weights", "kept", "work"))
        return f"{_gib(self.mib * 2**20)} GiB at most ({', '.join(parts)})"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def footprint(
    target: CheckpointFiles, draft: CheckpointFiles, scenarios: Sequence[Scenario], *, held: str
) -> Footprint:
    """What a reference of this pair takes for these scenarios, one after the other."""
    folders = [target] if target.folder == draft.folder else [target, draft]
    weights = sum(_weights(one, BYTES[held]) for one in folders)
    rows = max(sum(map(_rows, scenario.requests)) for scenario in scenarios)
    work = max(_work(target, request, scenario.spec) for scenario in scenarios for request in scenario.requests)
    return Footprint(weights=weights, kept=rows * kept_a_row(target, draft), work=work)


def _weights(one: CheckpointFiles, size: int) -> int:
    if not one.tensors:
        return sum(file.stat().st_size for file in one.weights)
    return sum(math.prod(tensor.shape) * (size if "float" in tensor.dtype else 8) for tensor in one.tensors.values())


def _number(one: CheckpointFiles, key: str, otherwise: int) -> int:
    found = one.of_text(key)
    return found if isinstance(found, int) and found > 0 else otherwise


class _Sizes(NamedTuple):
    """keys: what a layer keeps of a row, keys and values of all heads. state: the matrices of a recurrent layer."""

    hidden: int
    heads: int
    keys: int
    inner: int
    layers: int
    vocab: int
    state: int


def _sizes(one: CheckpointFiles) -> _Sizes:
    hidden, heads = _number(one, "hidden_size", 1), _number(one, "num_attention_heads", 1)
    width = _number(one, "head_dim", hidden // heads)
    keys = 2 * _number(one, "num_key_value_heads", heads) * width
    if one.of_text("kv_lora_rank"):
        parts = [_number(one, f"{name}_head_dim", width) for name in ("qk_nope", "qk_rope", "v")]
        keys, width = heads * sum(parts), max(parts[0] + parts[1], parts[2])
    parts = [_number(one, f"linear_{name}", 0) for name in ("num_value_heads", "key_head_dim", "value_head_dim")]
    keys = max(keys, 3 * parts[0] * (parts[1] + parts[2]))  # of a recurrent layer: what a row writes
    inner = max(_number(one, "intermediate_size", 4 * hidden), heads * width)
    layers, vocab = _number(one, "num_hidden_layers", 1), _number(one, "vocab_size", 1)
    return _Sizes(hidden, heads, keys, inner, layers, vocab, state=math.prod(parts))


def _rows(request: RequestSpec) -> int:
    return len(request.input_ids) + request.max_new_tokens


def kept_a_row(target: CheckpointFiles, draft: CheckpointFiles) -> int:
    """Keys and values of every layer; the states a head reads of the target, and what it gave."""
    one, other = _sizes(target), _sizes(draft)
    layers = 0 if draft.folder == target.folder else other.layers
    return WIDE * (one.layers * one.keys + (layers + 4) * other.keys + 8 * max(one.hidden, other.hidden))


def _work(target: CheckpointFiles, request: RequestSpec, spec: SpecConfig) -> int:
    from reference.attention import SCORES
    from reference.draft import LOGIT_ROWS
    from reference.model import ROWS
    from reference.pairs import is_ours

    one, rows = _sizes(target), _rows(request)
    largest = max((math.prod(tensor.shape) for tensor in target.tensors.values()), default=one.vocab * one.hidden)
    whole = one.heads * rows * rows
    scores = 4 * min(SCORES, whole)
    if not is_ours(target.folder):  # runs whole sequences, those of a request's verifies side by side
        scores = 4 * max(whole, min(SCORES, request.max_new_tokens * whole))
    inside = 6 * rows * one.hidden + 3 * min(rows, ROWS) * one.inner + scores + 2 * rows * one.keys
    answers = request.max_new_tokens * spec.num_draft_tokens * one.vocab  # logits of every verify
    drafts = request.max_new_tokens * (spec.num_steps * spec.eagle_topk + 2) * one.vocab  # and of every draft row
    ranked = max(spec.num_draft_tokens, min(LOGIT_ROWS, request.max_new_tokens * spec.eagle_topk))
    sorting = 6 * ranked * one.vocab  # whole numbers of 8 bytes, three times
    states = 3 * rows * one.state  # behind each row of a text, in one layer
    return WIDE * (largest + max(inside, answers + drafts + sorting) + states)
