"""Multi-token prediction with one layer a depth: what each layer reads, and what it proposes.

Written from DeepSeek-V3 (arXiv 2412.19437) section 2.2: the layer of depth i joins, at position j, a representation of
position j and the embedding of token j+1+i, each through a norm of its own, runs one decoder layer over that, and its
output speaks of token j+2+i through the shared embedding and head. (Depths count from 0 here.) In the paper the
representation is the output of the depth before; in MiMo-V2 it is the main model's for every depth, and the embedding
comes first in the join. Weights are named as published MiMo-V2 checkpoints name them.

When rows p..q-1 run, the text may not reach as far as a deep layer reads. Token q+1+m is then what layer m has just
proposed from row q-1, and the row is not run again when the text turns out otherwise. So what a layer should have read
at a row depends on when the row ran, which is what `Window` says. This module must not look at a trace.

Shapes: T rows, h hidden width, V vocabulary, k layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from reference.checkpoint import CheckpointError, Config, Weights, a_pair, built_here, read_json
from reference.model import Layer, Target, causal, rms_norm

ARCHITECTURE = "MiMoV2FlashForCausalLM"
#: Parts of a MiMo-V2 target that are not Llama arithmetic, and the values that switch them off.
_OFF: dict[str, Any] = {
    "attention_value_scale": None,
    "partial_rotary_factor": 1.0,
    "sliding_window_size": -1,
    "add_swa_attention_sink_bias": False,
    "add_full_attention_sink_bias": False,
}
#: The same for lists with an entry a layer.
_OFF_EVERYWHERE = ("hybrid_layer_pattern", "moe_layer_freq")


def read_config(path: Path) -> Config:
    """A MiMo-V2 config whose arithmetic is Llama's; CheckpointError if it asks for anything else."""
    file = Path(path) / "config.json"
    raw = read_json(file)
    config = Config.read(path, architecture=ARCHITECTURE)
    wanted = _OFF | {
        "layernorm_epsilon": config.eps,
        "v_head_dim": config.head_dim,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.head_dim,
        "swa_num_attention_heads": config.heads,
        "swa_num_key_value_heads": config.kv_heads,
        "swa_rope_theta": config.rope_theta,
    }
    wanted |= {name: [0] * config.layers for name in _OFF_EVERYWHERE}
    built_here(file, raw, wanted)
    return config


class MtpLayer:
    """One depth: two norms, a projection that joins them, a decoder layer, and a norm before the shared head."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: Config,
        target: Target,
        *,
        post_norm: str = "pre_mlp_layernorm",
        final: str = "final_layernorm",
    ) -> None:
        """post_norm, final: what the layer's second norm and the one before the head are called."""
        h = config.hidden
        self.target, self.embed, self.eps = target, target.embed, config.eps
        self.token_norm = weights.take(f"{prefix}enorm.weight", h)
        self.state_norm = weights.take(f"{prefix}hnorm.weight", h)
        self.join = weights.take(f"{prefix}eh_proj.weight", h, 2 * h)
        self.layer = Layer(weights, prefix, config, post_norm=post_norm)
        self.final_norm = weights.take(f"{prefix}{final}.weight", h)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """tokens int64 [T], hidden [T,h], positions int64 [T], mask bool [T,T] -> g [T,h], before the final norm."""
        token = rms_norm(embedding(tokens, self.embed), self.token_norm, self.eps)
        state = rms_norm(hidden, self.state_norm, self.eps)
        return self.layer.forward(linear(torch.cat((token, state), dim=-1), self.join), positions, mask)

    def logits(self, g: Tensor) -> Tensor:
        """g [...,h] -> [...,V]."""
        return self.target.logits(rms_norm(g, self.final_norm, self.eps))


class MtpHead:
    """k layers behind one target. chained: a layer reads the output of the one before instead of the target's."""

    def __init__(self, layers: Sequence[MtpLayer], target: Target, *, chained: bool = False) -> None:
        self.layers, self.target, self.chained = tuple(layers), target, chained

    @staticmethod
    def load(
        path: Path, target: Target, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None
    ) -> MtpHead:
        """Every MTP layer in a MiMo-V2 folder; CheckpointError if there is none or it does not fit `target`."""
        config = read_config(path)
        a_pair(path, config, target.config)
        weights, layers = Weights(path, dtype, held), list[MtpLayer]()
        while (prefix := f"model.mtp.layers.{len(layers)}.") + "eh_proj.weight" in weights:
            layers.append(MtpLayer(weights, prefix, config, target))
        if not layers:
            raise CheckpointError(f"{path}: has no tensor {prefix + 'eh_proj.weight'!r}; expected MTP layers from 0 on")
        return MtpHead(layers, target)

    def features(self, states: list[Tensor]) -> Tensor:
        """The target's last hidden state after its final norm, [T,h]."""
        return states[-1]


def load_target(path: Path, dtype: torch.dtype = torch.float32, *, held: torch.dtype | None = None) -> Target:
    """The main model of a MiMo-V2 folder; CheckpointError if it is not one, or not one this reference builds."""
    config = read_config(path)
    return Target(Weights(path, dtype, held), config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows start..stop-1, which ran together. known: tokens of the text that existed then.

    proposals: what somebody else's layers proposed from the last row, None where the reference's own counts.
    guess: what stood for token `stop` although the text had it (docs/findings/F-010.md), None where nothing did.
    again: how many rows before `start` each layer ran once more, now that more of the text was known; () is none.
    stale: states [m,h] that those rows read, the last one at start-1, None where they read the target's own.
    held: what the k layers had read at rows 0..start-1 when they last ran, where a cache may have exchanged them; an
    empty entry is not known, and counts as what this request's layers would read.
    """

    start: int
    stop: int
    known: int
    proposals: tuple[int | None, ...] = ()
    guess: int | None = None
    again: tuple[int, ...] = ()
    stale: Tensor | None = None
    held: tuple[tuple[int, ...], ...] = ()

    def first(self, i: int) -> int:
        """The first row that layer i ran."""
        return max(0, self.start - (self.again[i] if i < len(self.again) else 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """One layer over a request's rows [R]: tokens int64 [R] read, states [R,h] read, g [R,h] said."""

    tokens: Tensor
    hidden: Tensor
    g: Tensor


def read_depths(
    head: MtpHead, tokens: Tensor, hidden: Tensor, windows: Sequence[Window], k: int
) -> tuple[list[Depth], list[Window]]:
    """k layers over the rows that `windows` ran, in order and without gaps, and the windows with all proposals filled.

    tokens int64 [T]: the text. hidden [>=R,h]: the target's states. Rows before the first window (cached from
    elsewhere) count as run when their window's text was known.
    """
    rows = windows[-1].stop
    positions, mask, state = torch.arange(rows), causal(rows), hidden[:rows]
    depths, filled = list[Depth](), list(windows)
    if head.chained and any(window.again for window in windows):
        raise ValueError("layers that read each other's output and run rows again are not built here")
    for i in range(k):
        layer = head.layers[i]
        fed = torch.tensor(_fed(tokens.tolist(), filled, i))
        g = layer.forward(fed, state, positions, mask)
        if any(window.again or window.held for window in windows):
            g = _as_they_ran(layer, tokens.tolist(), state, filled, i)
        depths.append(Depth(tokens=fed, hidden=state, g=g))
        best = layer.logits(g[[window.stop - 1 for window in filled]]).argmax(-1).tolist()
        filled = [_fill(window, i, own) for window, own in zip(filled, best, strict=True)]
        state = g if head.chained else state
    return depths, filled


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a request's rows hold in one layer once a window has run there: tokens [stop], states [stop,h].

    first: the first row that the layer ran for this window; start: the window's own first.
    """

    tokens: list[int]
    states: Tensor
    first: int
    start: int


def as_held(text: list[int], hidden: Tensor, windows: Sequence[Window], i: int) -> Iterator[Held]:
    """Window by window, what layer i's rows hold; hidden [R,h]: the target's states. Proposals must be filled.

    What a row holds (its key and value) depends on its token and state alone, so it is enough to keep those.
    """
    tokens, states = [0] * len(hidden), hidden.clone()
    for number, window in enumerate(windows):
        start, stop = window.start if number else 0, window.stop
        first = window.first(i) if number else len(window.held)
        for row, read in enumerate(window.held):
            tokens[row] = read[i] if read else _read(window, text, row + 1 + i)
        tokens[first:stop] = [_read(window, text, row + 1 + i) for row in range(first, stop)]
        states[first:stop] = hidden[first:stop]
        if window.stale is not None and first < start:
            states[first:start] = window.stale[first - start :]
        yield Held(tokens=tokens[:stop], states=states[:stop].clone(), first=first, start=start)


def _as_they_ran(layer: MtpLayer, text: list[int], hidden: Tensor, windows: Sequence[Window], i: int) -> Tensor:
    """g [R,h] of layer i, each row by what the rows before it held when its window ran. hidden [R,h]."""
    said = list[Tensor]()
    for held in as_held(text, hidden, windows, i):
        stop = len(held.tokens)
        g = layer.forward(torch.tensor(held.tokens), held.states, torch.arange(stop), causal(stop))
        said.append(g[held.start :])
    return torch.cat(said)


def _fed(text: list[int], windows: Sequence[Window], i: int) -> list[int]:
    """The token that layer i reads at every row; layers before it have their proposals filled."""
    fed: list[int] = []
    for number, window in enumerate(windows):
        for row in range(window.start if number else 0, window.stop):
            fed.append(_read(window, text, row + 1 + i))
    return fed


def reads(text: Sequence[int], window: Window, k: int) -> list[tuple[int, ...]]:
    """What each of k layers reads at every row of a window whose proposals are known."""
    rows = range(window.start, window.stop)
    return [tuple(_read(window, text, row + 1 + i) for i in range(k)) for row in rows]


def _read(window: Window, text: Sequence[int], at: int) -> int:
    """The token that a row of `window` takes for the one at index `at`."""
    proposed = _not_text(window, at)
    return text[at] if proposed is None else proposed


def _not_text(window: Window, at: int) -> int | None:
    """What stands at index `at` instead of the text's own token; None where that is read."""
    if window.guess is not None and at == window.stop:
        return window.guess
    known = window.known if window.guess is None else window.stop
    return None if at < known else window.proposals[at - window.stop - 1]


def _fill(window: Window, i: int, own: int) -> Window:
    """`window` with a proposal of layer i."""
    given = window.proposals[i] if i < len(window.proposals) else None
    filled = own if given is None else given
    return replace(window, proposals=(*window.proposals[:i], filled, *window.proposals[i + 1 :]))
