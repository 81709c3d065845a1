"""The latent-attention reference against Hugging Face's DeepSeek-V3 code, which shares none with it.

HF multiplies keys and values out as well, but rotates by tables, holds all experts in one tensor and routes by groups.
It has no NextN module, so the join of token and state is written out here from the definition.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3MoE,
    DeepseekV3RotaryEmbedding,
)

from cases.checkpoints import make
from reference.attention import Sight
from reference.checkpoint import CheckpointError, Weights
from reference.mla import Experts, LatentConfig, NextNHead, load_target
from reference.pairs import load_pair

torch.set_num_threads(1)

CLOSE = 1e-5
#: YaRN stretches all positions alike, so a longer text would show nothing but the rounding of HF's angles.
LENGTH = 64
DOUBLE = torch.float64  # logits of this pair are larger than most, and HF rotates in float32 anyway


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make("mla-tiny", tmp_path_factory.mktemp("pairs"))


def hf_config(folder, **changes):
    return DeepseekV3Config.from_pretrained(folder, attn_implementation="eager", **changes)


def tokens_of(length, vocab, seed=0):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))


def hf_layer_weights(tensors, prefix, experts):
    """The checkpoint's names as HF's layer has them: one tensor for all experts, gate above up."""
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    parts = {
        kind: torch.stack([own.pop(f"mlp.experts.{e}.{kind}_proj.weight") for e in range(experts)])
        for kind in ("gate", "up", "down")
    }
    own["mlp.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
    own["mlp.experts.down_proj"] = parts["down"]
    return own


@pytest.mark.parametrize("length", [1, 2, 7, LENGTH])
def test_target_logits_and_every_hidden_state_equal_hf(pair, length):
    hf = DeepseekV3ForCausalLM.from_pretrained(pair.target, attn_implementation="eager", dtype=DOUBLE)
    target = load_target(pair.target, DOUBLE)
    tokens = tokens_of(length, target.config.vocab, seed=length)
    with torch.no_grad():
        theirs = hf(tokens[None], output_hidden_states=True)
    states = target.hidden_states(tokens)
    assert len(states) == len(theirs.hidden_states)
    for index, (mine, other) in enumerate(zip(states, theirs.hidden_states, strict=True)):
        assert torch.allclose(mine, other[0], rtol=0, atol=CLOSE), f"hidden state {index} differs from HF"
    assert torch.allclose(target.logits(states[-1]), theirs.logits[0], rtol=0, atol=CLOSE), "logits differ from HF"


def test_nextn_layer_equals_the_join_and_an_hf_layer_with_experts(pair):
    target, head = load_pair(pair.target, pair.draft)
    assert isinstance(head, NextNHead)
    tensors, config = load_file(pair.draft / "model.safetensors"), hf_config(pair.draft)
    own = hf_layer_weights(tensors, f"model.layers.{target.config.layers}.", config.n_routed_experts)
    layer = DeepseekV3DecoderLayer(config, layer_idx=target.config.layers).eval()
    missing, unexpected = layer.load_state_dict(own, strict=False)
    around = ["eh_proj.weight", "embed_tokens.weight", "enorm.weight", "hnorm.weight"]
    around += ["shared_head.head.weight", "shared_head.norm.weight"]
    assert (missing, sorted(unexpected)) == ([], around)
    tokens = tokens_of(LENGTH, target.config.vocab)
    hidden = torch.randn(LENGTH, target.config.hidden, generator=torch.Generator().manual_seed(1))
    size, eps = (target.config.hidden,), config.rms_norm_eps
    token = rms_norm(target.embed(tokens), size, own["enorm.weight"], eps)
    x = linear(torch.cat((token, rms_norm(hidden, size, own["hnorm.weight"], eps)), dim=-1), own["eh_proj.weight"])
    positions = torch.arange(LENGTH)
    bias = torch.zeros(LENGTH, LENGTH).masked_fill(~Sight.causal(LENGTH).mask(slice(0, LENGTH), 0), float("-inf"))[
        None, None
    ]
    with torch.no_grad():
        angles = DeepseekV3RotaryEmbedding(config)(x[None], positions[None])
        theirs = rms_norm(
            layer(x[None], attention_mask=bias, position_embeddings=angles)[0],
            size,
            own["shared_head.norm.weight"],
            eps,
        )
    mine, _ = head.forward(tokens, hidden, positions, Sight.causal(LENGTH))
    assert torch.allclose(mine, theirs, rtol=0, atol=CLOSE), "the NextN layer differs from the join and HF's layer"
    assert torch.equal(head.logits(mine), target.logits(mine)), "the draft must speak through the target's head"


def test_experts_are_chosen_by_biased_score_and_weighed_by_the_plain_one(pair, tmp_path):
    """Eight experts, two a row: which two depends on the row, and the bias changes the choice for some rows."""
    config = hf_config(pair.target, n_routed_experts=8, num_experts_per_tok=2)
    config.num_local_experts = 8
    torch.manual_seed(5)
    moe = DeepseekV3MoE(config).eval()
    for weight in [*moe.parameters(), moe.gate.e_score_correction_bias]:
        torch.nn.init.normal_(weight, std=0.3)
    gate, up = moe.experts.gate_up_proj.chunk(2, dim=1)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": moe.experts.down_proj}
    tensors = {f"experts.{e}.{name}.weight": value[e] for name, value in parts.items() for e in range(8)}
    tensors |= {name: value for name, value in moe.state_dict().items() if not name.startswith("experts.")}
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    raw = json.loads((pair.target / "config.json").read_text()) | {"n_routed_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mine = Experts(Weights(tmp_path, torch.float32), "", LatentConfig.load(tmp_path))
    x = torch.randn(50, config.hidden_size)
    with torch.no_grad():
        theirs = moe(x[None])[0]
        plain = linear(x, mine.gate).sigmoid()
    assert torch.allclose(mine.forward(x), theirs, rtol=0, atol=CLOSE)
    unbiased, biased = (score.topk(2, dim=-1).indices.sort(dim=-1).values for score in (plain, plain + mine.bias))
    assert not torch.equal(unbiased, biased), "this bias changes no choice, so nothing was shown"


def test_rows_see_nothing_after_them_and_only_relative_positions_matter(pair):
    target = load_target(pair.target, torch.float64)
    tokens, positions = tokens_of(30, target.config.vocab), torch.arange(30)
    plain = target.forward(tokens)
    assert torch.allclose(target.forward(tokens[:11]), plain[:11], rtol=0, atol=1e-12)
    assert torch.allclose(target.forward(tokens, positions + 5), plain, rtol=0, atol=1e-10)
    moved = positions + (positions >= 29)
    assert (target.forward(tokens, moved) - plain)[29].abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 2}, "n_group is 2; this reference builds only 1"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace is 1; this reference builds only 3"),
        ({"rope_scaling": None}, "rope_type is 'default'; this reference builds only 'yarn'"),
        ({"q_lora_rank": 40}, "q_a_proj.weight' has shape \\(48, 64\\); expected \\(40, 64\\)"),
    ],
    ids=["groups", "experts-in-the-target", "no-yarn", "another-rank"],
)
def test_what_is_not_built_here_is_named(pair, tmp_path, changes, words):
    shutil.copytree(pair.target, tmp_path / "target")
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=words):
        load_target(tmp_path / "target")
