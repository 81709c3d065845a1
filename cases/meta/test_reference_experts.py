"""Mixtures of experts against Hugging Face's blocks, which share no code with ours and hold all experts in one tensor.

Each case is a random tiny config over the switches of its family. What Hugging Face leaves out of a published family is
written out a second way below and says so.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from reference import mixtures
from reference.checkpoint import CheckpointError
from reference.experts import Experts, Router, Routing

HIDDEN, WIDTH, ROWS = 24, 12, 40
CLOSE = 1e-6


class Named(dict):
    """Tensors by name, as a checkpoint has them."""

    def take(self, name, *shape):
        assert tuple(self[name].shape) == shape, name
        return self[name]


@dataclass(frozen=True)
class Family:
    """How a family's block is made and read. names: of its parts where they are not as Qwen has them."""

    config: type
    block: type
    read: object
    keys: dict
    prefix: str = "mlp."
    parts: tuple = ("gate_proj", "up_proj", "down_proj")


FAMILIES = {
    "mixtral": Family(
        MixtralConfig,
        MixtralSparseMoeBlock,
        mixtures.read_mixtral,
        {"experts": "num_local_experts"},
        "block_sparse_moe.",
        ("w1", "w3", "w2"),
    ),
    "qwen2": Family(Qwen2MoeConfig, Qwen2MoeSparseMoeBlock, mixtures.read_qwen, {"experts": "num_experts"}),
    "qwen3": Family(Qwen3MoeConfig, Qwen3MoeSparseMoeBlock, mixtures.read_qwen, {"experts": "num_experts"}),
    "deepseek_v2": Family(DeepseekV2Config, DeepseekV2Moe, mixtures.read_deepseek_v2, {"experts": "n_routed_experts"}),
    "deepseek_v3": Family(DeepseekV3Config, DeepseekV3MoE, mixtures.read_sigmoid, {"experts": "n_routed_experts"}),
    "glm": Family(Glm4MoeConfig, Glm4MoeMoE, mixtures.read_sigmoid, {"experts": "n_routed_experts"}),
    "ernie": Family(
        Ernie4_5_MoeConfig,
        Ernie4_5_MoeSparseMoeBlock,
        mixtures.read_ernie,
        {"experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "gpt_oss": Family(GptOssConfig, GptOssMLP, mixtures.read_gpt_oss, {"experts": "num_local_experts"}),
}


@st.composite
def raws(draw, name):
    """A config over the switches of a family."""
    keys = FAMILIES[name].keys
    groups = draw(st.sampled_from([1, 2, 4])) if name in ("deepseek_v2", "deepseek_v3", "glm") else 1
    experts = groups * draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    chosen = draw(st.integers(1, kept * experts // groups))
    raw = {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        keys["experts"]: experts,
        keys.get("num_experts_per_tok", "num_experts_per_tok"): chosen,
        "norm_topk_prob": draw(st.booleans()) and name != "deepseek_v2",
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "n_group": groups,
        "topk_group": kept,
        "first_k_dense_replace": 0,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 1,
    }
    if name == "qwen2":
        raw["shared_expert_intermediate_size"] = draw(st.sampled_from([6, 18]))
    if name == "deepseek_v2":
        raw["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    if name in ("deepseek_v2", "deepseek_v3", "glm"):
        raw["n_shared_experts"] = draw(st.integers(1, 2))
    if name == "ernie":
        raw["moe_num_shared_experts"] = draw(st.integers(0, 2))
    if name == "gpt_oss":
        raw["swiglu_limit"] = draw(st.sampled_from([0.5, 7.0]))
    return raw


def hf_block(name, raw, seed):
    torch.manual_seed(seed)
    family = FAMILIES[name]
    config = family.config(**{key: value for key, value in raw.items() if key != "moe_layer_start_index"})
    config._experts_implementation = "eager"
    block = family.block(config).double().eval()
    for tensor in [*block.parameters(), *block.buffers()]:
        torch.nn.init.normal_(tensor, std=0.4)
    return block


def published(name, block):
    """A block's tensors under the names that published checkpoints have."""
    own = {key: value.detach() for key, value in block.state_dict().items()}
    family = FAMILIES[name]
    if name != "gpt_oss":
        gate, up = own.pop("experts.gate_up_proj").chunk(2, dim=1)
        for part, tensor in zip(family.parts, (gate, up, own.pop("experts.down_proj")), strict=True):
            own |= {f"experts.{e}.{part}.weight": tensor[e].contiguous() for e in range(len(tensor))}
    own = {key.replace("gate.moe_statics", "moe_statics"): value for key, value in own.items()}
    return Named({f"model.layers.2.{family.prefix}{key}": value for key, value in own.items()})


def said(block, x):
    out = block(x[None])
    return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_mixture_equals_hf(name, data):
    raw = data.draw(raws(name), label="config")
    block = hf_block(name, raw, data.draw(st.integers(0, 999), label="seed"))
    mine = FAMILIES[name].read(raw).mlp(published(name, block), "model.layers.2.", 2)
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        theirs = said(block, x)
        ours = mine.forward(x)
    assert (ours - theirs).abs().max() < CLOSE * max(1, theirs.abs().max()), raw


def test_published_experts_in_one_tensor_say_the_same():
    raw = {"hidden_size": HIDDEN, "intermediate_size": 8, "moe_intermediate_size": WIDTH, "num_experts": 6}
    raw |= {"num_experts_per_tok": 2, "norm_topk_prob": True}
    block = hf_block("qwen3", raw | {"num_hidden_layers": 1}, 3)
    split = published("qwen3", block)
    fused = Named({f"model.layers.2.mlp.{key}": value.detach() for key, value in block.state_dict().items()})
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    read = mixtures.read_qwen(raw)
    one, other = (read.mlp(source, "model.layers.2.", 2).forward(x) for source in (split, fused))
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_correction_changes_who_is_chosen_and_not_what_they_weigh():
    routing = Routing(experts=6, chosen=2, score="sigmoid")
    torch.manual_seed(0)
    gate, correction, x = torch.randn(6, HIDDEN), torch.randn(6), torch.randn(ROWS, HIDDEN)
    plain, corrected = Router(gate, routing).forward(x), Router(gate, routing, correction=correction).forward(x)
    assert not torch.equal(plain.experts.sort().values, corrected.experts.sort().values)
    scores = (x @ gate.T).sigmoid()
    assert torch.allclose(corrected.weights, scores.gather(-1, corrected.experts))


def test_only_chosen_experts_are_run():
    runs = []
    experts = [SimpleNamespace(forward=lambda x, e=e: runs.append((e, len(x))) or x) for e in range(16)]
    torch.manual_seed(2)
    mixture = Experts(Router(torch.randn(16, HIDDEN), Routing(experts=16, chosen=2)), experts)
    mixture.forward(torch.randn(3, HIDDEN))
    assert sum(rows for _, rows in runs) == 6
    assert len(runs) <= 6


def test_rows_in_half_precision_are_weighed_in_float32():
    """Sixteen equal experts that say the row itself: the weights must still sum to one."""
    routing = Routing(experts=16, chosen=16)
    mixture = Experts(Router(torch.randn(16, HIDDEN), routing), [SimpleNamespace(forward=lambda x: x)] * 16)
    x = torch.randn(ROWS, HIDDEN).to(torch.bfloat16)
    out = mixture.forward(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("layers", "raw"),
    [
        ([3, 7], {"decoder_sparse_step": 4, "mlp_only_layers": []}),
        ([0, 2, 3], {"decoder_sparse_step": 1, "mlp_only_layers": [1, 4, 5, 6, 7]}),
    ],
)
def test_qwen_says_which_layers_are_mixtures(layers, raw):
    raw = raw | {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8}
    read = mixtures.read_qwen(raw | {"num_experts": 4, "num_experts_per_tok": 2})
    assert [i for i in range(8) if read.sparse(i)] == layers


def test_deepseek_and_ernie_say_which_layers_are_mixtures():
    raw = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    deepseek = raw | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    deepseek |= {"routed_scaling_factor": 1, "first_k_dense_replace": 3, "moe_layer_freq": 2}
    assert [i for i in range(8) if mixtures.read_sigmoid(deepseek).sparse(i)] == [4, 6]
    ernie = raw | {"moe_num_experts": 4, "moe_k": 2, "num_hidden_layers": 8, "moe_layer_start_index": 1}
    ernie |= {"moe_layer_interval": 2, "moe_layer_end_index": 5}
    assert [i for i in range(8) if mixtures.read_ernie(ernie).sparse(i)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("read", "changes"),
    [
        (mixtures.read_sigmoid, {"scoring_func": "softmax"}),
        (mixtures.read_sigmoid, {"topk_method": "greedy"}),
        (mixtures.read_deepseek_v2, {"scoring_func": "sigmoid"}),
        (mixtures.read_deepseek_v2, {"topk_method": "noaux_tc"}),
        (mixtures.read_deepseek_v2, {"norm_topk_prob": True, "routed_scaling_factor": 2.0}),
    ],
)
def test_another_way_of_choosing_is_refused(read, changes):
    raw = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "n_routed_experts": 4}
    raw |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    with pytest.raises(CheckpointError, match="this reference builds"):
        read(raw | {"routed_scaling_factor": 1.0} | changes)
