"""What a fault could take for another thing without being seen: equal tensors and sizes of a pair, equal numbers of a
scenario.

Each is said in words, as `what: one = other`, so that a table can name those that have a reason. It must not judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from cases.recipes import Pair
from harness.contract.scenario import Scenario

#: Sizes that a config names.
SIZES = (
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "max_position_embeddings",
)


def of_pair(pair: Pair) -> list[str]:
    """Tensors that are multiples of each other (`alike`), that say one number or none (`constant`), and equal sizes."""
    tensors = _tensors(pair)
    constant = {name for name, value in tensors.items() if np.ptp(value) == 0}
    found = [f"constant: {name}" for name in sorted(constant)]
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, value in tensors.items():
        if name not in constant:
            by_shape.setdefault(value.shape, []).append(name)
    for names in by_shape.values():
        alike = _multiples(np.stack([tensors[name].ravel() for name in names]))
        found += [f"alike: {names[a]} = {names[b]}" for a, b in combinations(range(len(names)), 2) if alike[a, b]]
    return found + [f"size: {one}" for one in equal(sizes(pair))]


def _tensors(pair: Pair) -> dict[str, np.ndarray]:
    """Those of both sides, float64 [numbers]; once where a draft lies in its target's folder."""
    own = {} if pair.draft_config == pair.target_config else pair.draft
    named = {f"target {name}": value for name, value in pair.target.items()}
    named |= {f"draft {name}": value for name, value in own.items()}
    return {name: value.astype(np.float64) for name, value in named.items()}


def _multiples(rows: np.ndarray) -> np.ndarray:
    """bool [n, n]: which of the rows [n, numbers] are multiples of which."""
    products = rows @ rows.T
    lengths = np.diag(products)
    alike: np.ndarray = products**2 >= (1 - 1e-12) * lengths[:, None] * lengths
    return alike


def sizes(pair: Pair) -> dict[str, int]:
    """Every size of the target above one, and of the draft where it is another."""
    target, draft = _named(pair.target_config), _named(pair.draft_config)
    hidden = pair.target_config["hidden_size"]
    if (fused := pair.draft.get("fc.weight")) is not None:
        draft["fc inputs"] = fused.shape[1]
    aside = {f"draft {name}": size for name, size in draft.items() if size != target.get(name)}
    return {name: size for name, size in (target | aside).items() if size > 1} | {"hidden_size twice": 2 * hidden}


def _named(config: Mapping[str, Any]) -> dict[str, int]:
    found = {name: int(config[name]) for name in SIZES if config.get(name)}
    if width := found.get("head_dim"):
        found |= {"queries": found["num_attention_heads"] * width, "keys": found["num_key_value_heads"] * width}
    return found


def of_scenario(scenario: Scenario) -> list[str]:
    """Equal lengths, limits and beginnings of requests, and equal numbers of the batch, the draft and the cache."""
    requests, spec, engine = scenario.requests, scenario.spec, scenario.engine
    found = [f"length: {one}" for one in equal({r.rid: len(r.input_ids) for r in requests})]
    found += [f"limit: {one}" for one in equal({r.rid: r.max_new_tokens for r in requests})]
    found += [f"end: {one}" for one in equal({r.rid: len(r.input_ids) + r.max_new_tokens for r in requests})]
    found += [f"beginning: {one}" for one in equal({r.rid: r.input_ids[0] for r in requests})]
    found += [f"stops: {one}" for one in equal({r.rid: r.stop_token_ids for r in requests if r.stop_token_ids})]
    sampled = {r.rid: r.temperature for r in requests if r.temperature}
    found += [f"temperature: {one}" for one in equal(sampled)]
    numbers = {
        "requests": len(requests),
        "num_steps": spec.num_steps,
        "eagle_topk": spec.eagle_topk,
        "num_draft_tokens": spec.num_draft_tokens,
        "page_size": engine.page_size,
        "dp_size": engine.dp_size,
    }
    found += [f"number: {one}" for one in equal({name: number for name, number in numbers.items() if number > 1})]
    if engine.dp_size > 1 and len(requests) > 1:
        on = [sum(r.dp_rank == rank for r in requests) for rank in range(engine.dp_size)]
        found += [f"rank: {one}" for one in equal({f"requests of {rank}": count for rank, count in enumerate(on)})]
    return found


def equal(named: Mapping[str, Any]) -> Iterator[str]:
    """`one = other` for every two that are."""
    yield from (f"{a} = {b}" for (a, one), (b, other) in combinations(named.items(), 2) if one == other)
