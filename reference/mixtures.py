"""Which layers of a published model are mixtures of experts, of what sizes, and what their weights are called.

Written from the configs and weight names of published checkpoints of each family; reference.experts has the arithmetic.
It must not know what attention a layer has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reference.checkpoint import CheckpointError
from reference.experts import ClampedMlp, Experts, GatedMlp, Router, Routing, Source, routed_mlps
from reference.model import RowWise

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a family calls the parts of a mixture, below the layer's prefix."""

    block: str = "mlp."
    gate: str = "gate.weight"
    correction: str | None = None
    correction_shape: tuple[int, ...] = ()
    experts: str = "experts."
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts."
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A family's MLPs. dense, width, shared: widths of a dense MLP, of an expert, of the shared expert (0: none).

    sparse: whether layer i is a mixture.
    """

    hidden: int
    dense: int
    width: int
    routing: Routing
    sparse: Callable[[int], bool]
    shared: int = 0
    names: Names = Names()

    def mlp(self, weights: Source, prefix: str, layer: int | None) -> RowWise:
        """What layer number `layer`, whose weights start with `prefix`, does to each row after attention.

        None: a layer beside those that are counted, which is what its weights are.
        """
        names = self.names
        router = f"{prefix}{names.block}{names.gate}"
        if not (router in weights if layer is None else self.sparse(layer)):
            return GatedMlp(weights, f"{prefix}mlp.", hidden=self.hidden, width=self.dense)
        block, routing = f"{prefix}{names.block}", self.routing
        correction = None
        if names.correction is not None:
            shape = (*names.correction_shape, routing.experts)
            correction = weights.take(f"{block}{names.correction}", *shape).reshape(-1)
        shared = shared_gate = None
        if self.shared:
            shared = GatedMlp(weights, f"{block}{names.shared}", hidden=self.hidden, width=self.shared)
            if names.shared_gate is not None:
                shared_gate = weights.take(f"{block}{names.shared_gate}", 1, self.hidden)
        return Experts(
            Router(weights.take(router, routing.experts, self.hidden), routing, correction=correction),
            routed_mlps(
                weights,
                f"{block}{names.experts}",
                experts=routing.experts,
                hidden=self.hidden,
                width=self.width,
                names=names.parts,
            ),
            shared=shared,
            shared_gate=shared_gate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedMixture:
    """gpt-oss: every layer a mixture, a router with a bias, all experts in one tensor a part."""

    hidden: int
    width: int
    routing: Routing
    limit: float

    def mlp(self, weights: Source, prefix: str, layer: int | None) -> RowWise:
        """See Mixture.mlp."""
        block, e, h, i = f"{prefix}mlp.", self.routing.experts, self.hidden, self.width
        router = Router(
            weights.take(f"{block}router.weight", e, h), self.routing, bias=weights.take(f"{block}router.bias", e)
        )
        gate_up = weights.take(f"{block}experts.gate_up_proj", e, h, 2 * i)
        gate_up_bias = weights.take(f"{block}experts.gate_up_proj_bias", e, 2 * i)
        down = weights.take(f"{block}experts.down_proj", e, i, h)
        down_bias = weights.take(f"{block}experts.down_proj_bias", e, h)
        parts = zip(gate_up, gate_up_bias, down, down_bias, strict=True)
        return Experts(router, [ClampedMlp(*part, limit=self.limit) for part in parts])


def dense(raw: Raw) -> Mixture:
    """A gated MLP in every layer."""
    return Mixture(
        hidden=raw["hidden_size"],
        dense=raw["intermediate_size"],
        width=0,
        routing=Routing(experts=0, chosen=0),
        sparse=lambda layer: False,
    )


def read_mixtral(raw: Raw) -> Mixture:
    """Mixtral: every layer a mixture, two of eight experts, their weights sum to one."""
    return Mixture(
        hidden=raw["hidden_size"],
        dense=0,
        width=raw["intermediate_size"],
        routing=Routing(experts=raw["num_local_experts"], chosen=raw["num_experts_per_tok"], normed=True),
        sparse=lambda layer: True,
        names=Names(block="block_sparse_moe.", parts=("w1", "w3", "w2")),
    )


def _mixture(raw: Raw, *, routing: Routing, sparse: Callable[[int], bool], **more: Any) -> Mixture:
    """With the sizes as most families name them; more: fields of a Mixture."""
    sizes = {"hidden": "hidden_size", "dense": "intermediate_size", "width": "moe_intermediate_size"}
    return Mixture(**{name: raw[key] for name, key in sizes.items()}, routing=routing, sparse=sparse, **more)


def read_qwen(raw: Raw) -> Mixture:
    """Qwen2-MoE, Qwen3-MoE and Qwen3-Next: softmax, and in the first and the last a shared expert with a gate."""
    every, dense = raw.get("decoder_sparse_step", 1), frozenset(raw.get("mlp_only_layers") or ())
    return _mixture(
        raw,
        routing=Routing(
            experts=raw.get("num_experts") or raw["num_local_experts"],
            chosen=raw["num_experts_per_tok"],
            normed=raw.get("norm_topk_prob", False),
        ),
        sparse=lambda layer: layer not in dense and (layer + 1) % every == 0,
        shared=raw.get("shared_expert_intermediate_size") or 0,
        names=Names(shared="shared_expert.", shared_gate="shared_expert_gate.weight"),
    )


def _deepseek_sparse(raw: Raw) -> Callable[[int], bool]:
    first, every, kinds = (raw.get(key) for key in ("first_k_dense_replace", "moe_layer_freq", "mlp_layer_types"))
    if kinds and first is None:
        return lambda layer: kinds[layer] == "sparse"
    first, every = first or 0, every or 1
    return lambda layer: layer >= first and layer % every == 0


def read_sigmoid(raw: Raw) -> Mixture:
    """DeepSeek-V3, Kimi-K2 and GLM-4.5: sigmoid scores, a bias in the choice, groups by the sum of their best two."""
    if raw.get("scoring_func", "sigmoid") != "sigmoid" or raw.get("topk_method", "noaux_tc") != "noaux_tc":
        raise CheckpointError(
            f"scoring_func is {raw.get('scoring_func')!r} and topk_method {raw.get('topk_method')!r}; this reference "
            "builds 'sigmoid' with 'noaux_tc'"
        )
    return _mixture(
        raw,
        routing=Routing.of_deepseek_v3(raw),
        sparse=_deepseek_sparse(raw),
        shared=(raw.get("n_shared_experts") or 0) * raw["moe_intermediate_size"],
        names=Names(correction="gate.e_score_correction_bias"),
    )


def read_deepseek_v2(raw: Raw) -> Mixture:
    """DeepSeek-V2: softmax, no bias, groups by their best expert.

    The published code scales weights or norms them, never both, so a config that asks for both is refused.
    """
    method, scaling = raw.get("topk_method", "greedy"), float(raw["routed_scaling_factor"])
    if raw.get("scoring_func", "softmax") != "softmax" or method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"scoring_func is {raw.get('scoring_func')!r} and topk_method {method!r}; this reference builds 'softmax' "
            "with 'greedy' or 'group_limited_greedy'"
        )
    if raw["norm_topk_prob"] and scaling != 1:
        raise CheckpointError(f"norm_topk_prob with routed_scaling_factor {scaling}; this reference builds one of them")
    groups, kept = raw.get("n_group"), raw.get("topk_group")
    grouped = method == "group_limited_greedy"
    return _mixture(
        raw,
        routing=Routing(
            experts=raw["n_routed_experts"],
            chosen=raw["num_experts_per_tok"],
            normed=raw["norm_topk_prob"],
            scaling=scaling,
            groups=(groups or 1) if grouped else 1,
            kept=(kept or 1) if grouped else 1,
        ),
        sparse=_deepseek_sparse(raw),
        shared=(raw.get("n_shared_experts") or 0) * raw["moe_intermediate_size"],
    )


def read_ernie(raw: Raw) -> Mixture:
    """ERNIE 4.5: softmax, a bias in the choice, weights that sum to one, shared experts."""
    first, end, every = raw["moe_layer_start_index"], raw.get("moe_layer_end_index", -1), raw["moe_layer_interval"]
    last = raw["num_hidden_layers"] - 1 if end in (None, -1) else end
    return _mixture(
        raw,
        routing=Routing(experts=raw["moe_num_experts"], chosen=raw["moe_k"], normed=True),
        sparse=lambda layer: first <= layer <= last and (layer + 1) % every == 0,
        shared=(raw.get("moe_num_shared_experts") or 0) * raw["moe_intermediate_size"],
        names=Names(correction="moe_statics.e_score_correction_bias", correction_shape=(1,)),
    )


def read_gpt_oss(raw: Raw) -> ClampedMixture:
    """gpt-oss: the best experts by logit, their softmax, which is the whole one's with the chosen weights normed."""
    return ClampedMixture(
        hidden=raw["hidden_size"],
        width=raw["intermediate_size"],
        routing=Routing(experts=raw["num_local_experts"], chosen=raw["num_experts_per_tok"], normed=True),
        limit=float(raw.get("swiglu_limit", 7.0)),
    )
