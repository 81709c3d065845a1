"""Nemotron-H: one mixer a layer (Mamba-2, attention without positions, an MLP, or experts), each behind a norm.

Written from Nemotron-H (arXiv 2504.03624) section 2, published configs and weight names: `hybrid_override_pattern` has
a letter a layer, and an MLP squares what its rectifier lets through. Newer ones have mixtures of such MLPs, routed as
DeepSeek-V3's are (see reference.experts), and a next-token layer (see reference.nextn) that is several mixers itself.
Experts that work in a narrower space are not built here. This module must not compute a recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reference.attention import Kept, Sight
from reference.checkpoint import CheckpointError, Config, Weights, a_pair, all_keys, of_architecture
from reference.experts import Experts, Router, Routing, Source
from reference.heads import GroupedAttention, Heads
from reference.keys import Keys
from reference.mamba import MambaMixer, MambaSizes
from reference.model import Attends, PaperTarget, RowWise, Target, linear, rms_norm
from reference.nextn import Join, NextNHead
from reference.rotation import Rotation

ARCHITECTURE = "NemotronHForCausalLM"
#: What a letter of the pattern stands for, and what newer configs call it in a list of their own.
MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
_KINDS = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION, "mlp": MLP}
_KINDS |= {"moe": EXPERTS}
#: What names of the next-token layer's weights begin with.
_NEXT = "mtp.layers."
#: Keys of what is not built, and the value that switches each off, or that the arithmetic has.
_ONLY = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
}
#: How weights are drawn before training, what is rounded to what, how a kernel cuts a text, when a kernel begins, and
#: what experts are like where no layer has any: nothing of a result.
_NOTHING = (
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual", "expand"),
    *("residual_in_fp32", "num_logits_to_keep", "chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels"),
    *("sliding_window", "num_hidden_layers", "num_nextn_predict_layers", "moe_shared_expert_overlap"),
    *("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group", "topk_group"),
)
#: Steps are not cut, as json has it and as transformers 5 writes it.
_UNCUT = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
#: What weights are called that other targets call otherwise.
_CALLED = {"model.embed_tokens.weight": "backbone.embeddings.weight", "model.norm.weight": "backbone.norm_f.weight"}


class SquaredMlp:
    """down(relu(up x)^2)."""

    def __init__(self, weights: Source, prefix: str, *, hidden: int, width: int) -> None:
        self.up = weights.take(f"{prefix}up_proj.weight", width, hidden)
        self.down = weights.take(f"{prefix}down_proj.weight", hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """See reference.model.RowWise."""
        return linear(linear(x, self.up).relu().square(), self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Widths of a routed expert and of the shared one."""

    routing: Routing
    width: int
    shared: int

    @staticmethod
    def read(keys: Keys) -> Mixture:
        """Of a config."""
        keys.refuse("moe_latent_size", but=None)
        routing = Routing.of_deepseek_v3(keys)
        width, shared = keys["moe_intermediate_size"], keys["moe_shared_expert_intermediate_size"]
        return Mixture(routing=routing, width=width, shared=shared)

    def experts(self, weights: Source, prefix: str, *, hidden: int) -> Experts:
        """Those of the layer whose weights begin with `prefix`."""
        count, gate = self.routing.experts, f"{prefix}gate."
        correction = weights.take(f"{gate}e_score_correction_bias", count)
        routed = [
            SquaredMlp(weights, f"{prefix}experts.{one}.", hidden=hidden, width=self.width) for one in range(count)
        ]
        return Experts(
            Router(weights.take(f"{gate}weight", count, hidden), self.routing, correction=correction),
            [*routed],
            shared=SquaredMlp(weights, f"{prefix}shared_experts.", hidden=hidden, width=self.shared),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerLayer:
    """A norm [h] and what comes behind it: something that sees other rows, or a row alone."""

    norm: Tensor
    eps: float
    attention: Attends | None = None
    mlp: RowWise | None = None

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """See reference.model.Layer."""
        read = rms_norm(x, self.norm, self.eps)
        if self.attention is not None:
            added, kept = self.attention.forward(read, positions, sight, kept)
            return x + added, kept
        assert self.mlp is not None
        return x + self.mlp.forward(read), Kept()


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerLayers:
    """The layers of one next-token layer, in order; one of them alone sees other rows."""

    layers: tuple[MixerLayer, ...]

    def forward(self, x: Tensor, positions: Tensor, sight: Sight, kept: Kept | None) -> tuple[Tensor, Kept]:
        """See reference.model.Layer."""
        behind = Kept()
        for layer in self.layers:
            x, own = layer.forward(x, positions, sight, kept)
            behind = behind if layer.attention is None else own
        return x, behind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What a config describes. pattern, next: a letter a layer, of the target and of the next-token layer, if any."""

    config: Config
    pattern: str
    next: str
    mamba: MambaSizes
    mixture: Mixture | None

    def layer(self, weights: Weights, prefix: str, kind: str) -> MixerLayer:
        """The layer whose weights begin with `prefix`."""
        c, inner = self.config, f"{prefix}mixer."
        attention: Attends | None = None
        mlp: RowWise | None = None
        if kind == MAMBA:
            attention = MambaMixer(weights, inner, self.mamba)
        elif kind == ATTENTION:
            still = Rotation(frequencies=torch.zeros(c.head_dim // 2))
            attention = GroupedAttention(weights, inner, Heads.of(c, still))
        elif kind == EXPERTS:
            assert self.mixture is not None
            mlp = self.mixture.experts(weights, inner, hidden=c.hidden)
        else:
            mlp = SquaredMlp(weights, inner, hidden=c.hidden, width=c.intermediate)
        norm = weights.take(f"{prefix}norm.weight", c.hidden)
        return MixerLayer(norm=norm, eps=c.eps, attention=attention, mlp=mlp)


def _weights(path: Path, held: torch.dtype, device: torch.device | str) -> Weights:
    """Rates of a recurrence stay as they are stored."""
    return Weights(path, held, device, exact=("A_log",), called=_CALLED)


def load_target(path: Path, dtype: torch.dtype, *, held: torch.dtype, device: torch.device | str) -> PaperTarget:
    """The target of a Nemotron-H folder; CheckpointError if it is not one, or not one that is built here."""
    read, weights = _read(path), _weights(path, held, device)
    stack = [read.layer(weights, f"backbone.layers.{i}.", kind) for i, kind in enumerate(read.pattern)]
    target = PaperTarget(weights, read.config, stack=stack)
    weights.all_taken(but=[name for name in weights if name.startswith(_NEXT)])
    return target.computing(dtype)


def load_head(path: Path, target: Target, *, held: torch.dtype | None = None) -> NextNHead:
    """The next-token layer of such a folder; CheckpointError if there is none or it does not fit `target`."""
    read = _read(path)
    if sorted(read.next.replace(EXPERTS, "")) != [ATTENTION]:
        raise CheckpointError(
            f"{path}: the next-token layer is {read.next!r}; this reference builds one attention with experts"
        )
    a_pair(path, read.config, vocab=target.vocab, hidden=target.hidden, layers=target.layers)
    weights = _weights(path, held or target.dtype, target.device)
    layers = tuple(read.layer(weights, f"{_NEXT}{i}.", kind) for i, kind in enumerate(read.next))
    join = Join(
        token_norm=f"{_NEXT}0.enorm.weight",
        state_norm=f"{_NEXT}0.hnorm.weight",
        join=f"{_NEXT}0.eh_proj.weight",
        final=f"{_NEXT}{len(layers) - 1}.final_layernorm.weight",
    )
    head = NextNHead(weights, join, MixerLayers(layers=layers), target, read.config.eps)
    weights.all_taken(but=[name for name in weights if not name.startswith(_NEXT)])
    return head


def _read(path: Path) -> _Read:
    keys = Keys.read(path)
    with all_keys(keys.file, ARCHITECTURE):
        found = _described(keys)
        keys.all_claimed()
        return found


def _described(keys: Keys) -> _Read:
    of_architecture(keys.file, keys, ARCHITECTURE)
    for key, only in _ONLY.items():
        keys.refuse(key, but=only)
    for key in _NOTHING:
        keys.get(key)
    if keys.get("time_step_limit", _UNCUT[0]) not in _UNCUT:
        raise CheckpointError(f"time_step_limit is {keys['time_step_limit']!r}; this reference builds only {_UNCUT[0]}")
    groups, pattern = keys["n_groups"], _pattern(keys, "layers_block_type", "hybrid_override_pattern")
    behind = _pattern(keys, "mtp_layers_block_type", "mtp_hybrid_override_pattern", default="")
    keys.refuse("mamba_n_groups", but=groups, why="expected n_groups, which SGLang calls so")
    config = Config(
        architecture=ARCHITECTURE,
        vocab=keys["vocab_size"],
        hidden=keys["hidden_size"],
        intermediate=keys["intermediate_size"],
        layers=len(pattern),
        heads=keys["num_attention_heads"],
        kv_heads=keys["num_key_value_heads"],
        head_dim=keys["head_dim"],
        eps=keys["layer_norm_epsilon"],
        rope_theta=1.0,
        tied=False,
    )
    mamba = MambaSizes(
        hidden=config.hidden,
        heads=keys["mamba_num_heads"],
        groups=groups,
        state=keys["ssm_state_size"],
        head=keys["mamba_head_dim"],
        conv=keys["conv_kernel"],
        eps=config.eps,
    )
    mixture = Mixture.read(keys) if EXPERTS in pattern + behind else None
    return _Read(config=config, pattern=pattern, next=behind, mamba=mamba, mixture=mixture)


def _pattern(keys: Keys, listed: str, lettered: str, *, default: str | None = None) -> str:
    """A letter a layer, of the key that lists them or the one that spells them; CheckpointError for one not built here.

    default: where neither is there.
    """
    kinds, letters = keys.get(listed), keys.get(lettered, default)
    if kinds is None and letters is None:
        raise KeyError(lettered)
    pattern = letters if kinds is None else "".join(_KINDS.get(one, "?") for one in kinds)
    if set(pattern) - {MAMBA, ATTENTION, MLP, EXPERTS}:
        raise CheckpointError(
            f"the layers are {kinds or pattern!r}; this reference builds Mamba-2, attention, MLPs and experts"
        )
    return str(pattern)
