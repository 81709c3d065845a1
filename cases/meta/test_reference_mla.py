"""The latent-attention reference against Hugging Face's DeepSeek-V3 code, which shares none with it.

HF multiplies keys and values out as well, but rotates by tables and holds all experts in one tensor. Its layer for
multi-token prediction is compared with ours in cases.meta.test_reference_nextn.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM, DeepseekV32ForCausalLM

from cases.meta.files import edit_json
from cases.meta.published import assert_like_hf, tokens_of
from harness.defects.draft_attention import UnseenRound
from reference.attention import Sight
from reference.checkpoint import CheckpointError
from reference.draft import Forced, Reading, draft
from reference.pairs import load_pair, load_target

#: YaRN stretches all positions alike, so a longer text would show nothing but the rounding of HF's angles.
LENGTH = 64
#: Of an indexer; with few heads scores of rows that no head is like are all zero, and which of these is best is open.
HEADS, WIDTH = 12, 32
DOUBLE = torch.float64  # logits of this pair are larger than most, and HF rotates in float32 anyway


@pytest.fixture(scope="module")
def pair(made_pair):
    return made_pair("mla-tiny")


@pytest.mark.parametrize("length", [1, 2, 7, LENGTH])
def test_target_logits_and_every_hidden_state_equal_hf(pair, length):
    hf = DeepseekV3ForCausalLM.from_pretrained(pair.target, attn_implementation="eager", dtype=DOUBLE)
    target = load_target(pair.target, DOUBLE)
    assert_like_hf(target, hf, tokens_of(length, target.vocab, seed=length))


def test_rows_see_nothing_after_them_and_only_relative_positions_matter(pair):
    target = load_target(pair.target, torch.float64)
    tokens, positions = tokens_of(30, target.vocab), torch.arange(30)
    plain = target.forward(tokens)
    assert torch.allclose(target.forward(tokens[:11]), plain[:11], rtol=0, atol=1e-12)
    assert torch.allclose(target.forward(tokens, positions + 5), plain, rtol=0, atol=1e-10)
    moved = positions + (positions >= 29)
    assert (target.forward(tokens, moved) - plain)[29].abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"index_topk": 2048}, "does not know what that changes"),
        ({"q_lora_rank": 40}, "q_a_proj.weight' has shape \\(48, 64\\); expected \\(40, 64\\)"),
        ({"first_k_dense_replace": 1}, "layers.1.mlp.gate"),
    ],
    ids=["choice", "unread", "another-rank", "no-experts-there"],
)
def test_what_is_not_built_here_is_named(pair, tmp_path, changes, words):
    shutil.copytree(pair.target, tmp_path / "target")
    edit_json(tmp_path / "target" / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        load_target(tmp_path / "target")


@pytest.fixture
def indexed(pair, tmp_path):
    """The pair's target with an indexer in each layer that chooses so many rows."""

    def make(most, **more):
        place = tmp_path / f"indexed-{most}"
        shutil.copytree(pair.target, place)
        config = json.loads((place / "config.json").read_text())
        config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **more}
        config |= {"index_topk": most, "index_n_heads": HEADS, "index_head_dim": WIDTH}
        (place / "config.json").write_text(json.dumps(config))
        weights, drawn = load_file(place / "model.safetensors"), torch.Generator().manual_seed(most)
        for layer in range(config["num_hidden_layers"] + 1):
            shapes = {
                "wq_b.weight": (HEADS * WIDTH, config["q_lora_rank"]),
                "wk.weight": (WIDTH, config["hidden_size"]),
            }
            shapes |= {
                "k_norm.weight": (WIDTH,),
                "k_norm.bias": (WIDTH,),
                "weights_proj.weight": (HEADS, config["hidden_size"]),
            }
            for name, shape in shapes.items():
                weights[f"model.layers.{layer}.self_attn.indexer.{name}"] = torch.randn(shape, generator=drawn)
        save_file(weights, place / "model.safetensors")
        return place

    return make


@pytest.mark.parametrize("most", [5, 30, LENGTH])
def test_rows_that_an_indexer_chooses_are_hfs(indexed, most):
    place = indexed(most)
    hf = DeepseekV32ForCausalLM.from_pretrained(place, attn_implementation="eager", dtype=DOUBLE)
    target = load_target(place, DOUBLE)
    assert_like_hf(target, hf, tokens_of(LENGTH, target.vocab, seed=most))


def test_a_text_read_in_parts_chooses_what_it_chooses_as_a_whole(indexed):
    target = load_target(indexed(9), DOUBLE)
    tokens, last = tokens_of(40, target.vocab), (target.layers,)
    whole, first = target.read(tokens, keep=last), target.read(tokens[:17], keep=last)
    second = target.read(tokens[17:], keep=last, after=first)
    parts = torch.cat([one.states[target.layers] for one in (first, second)])
    assert torch.allclose(parts, whole.states[target.layers], rtol=0, atol=1e-10)
    hanging = target.branch(first, tokens[17:20], torch.arange(17, 20), Sight.of([(17, (-1, 0, 1))]))
    assert torch.allclose(hanging[target.layers], parts[17:20], rtol=0, atol=1e-10)


def test_an_indexer_that_chooses_every_row_changes_none(pair, indexed):
    place = indexed(30)
    (plain, drafting), (target, head) = (load_pair(one, one, torch.float64) for one in (pair.target, place))
    tokens = tokens_of(30, plain.vocab)
    states = target.forward(tokens)
    assert torch.equal(states, plain.forward(tokens))
    rows = (tokens, states, torch.arange(30), Sight.causal(30))
    assert torch.equal(head.forward(*rows)[0], drafting.forward(*rows)[0])


@pytest.mark.parametrize("most", [30, 7])
def test_steps_that_share_a_choice_see_neither_themselves_nor_each_other(indexed, most):
    place = indexed(most)
    _, plain = load_pair(place, place, torch.float64)
    edit_json(place / "config.json", index_share_for_mtp_iteration=True)
    target, shared = load_pair(place, place, torch.float64)
    tokens, states = tokens_of(20, target.vocab), target.forward(tokens_of(20, target.vocab))
    rows = (tokens, states, torch.arange(20), Sight.causal(20))
    (g, _), (alike, kept) = plain.forward(*rows), shared.forward(*rows)
    assert torch.equal(g, alike)  # what a committed row sees is its own choice
    both = (tokens[:2], states[:2], torch.arange(20, 22), Sight.of([(20, (-1, 0))]))
    second = (tokens[1:2], states[1:2], torch.arange(21, 22), Sight.of([(20, (-1,))]))
    steps, alone = (shared.forward(*one, kept)[0] for one in (both, second))
    assert torch.allclose(steps[1], alone[0], rtol=0, atol=1e-12)
    assert (plain.forward(*both, kept)[0][1] - steps[1]).abs().max() > 1e-3


def test_steps_that_see_nothing_of_their_round_are_what_steps_with_a_shared_choice_are(indexed):
    """F-114, where an indexer chooses every row; a tree's beams, too."""
    place = indexed(30)
    _, plain = load_pair(place, place, torch.float64)
    edit_json(place / "config.json", index_share_for_mtp_iteration=True)
    _, shared = load_pair(place, place, torch.float64)
    tokens = tokens_of(24, plain.target.vocab).tolist()
    drawn = {}
    for name, head, own in (
        ("plain", plain, True),
        ("unseen", plain, UnseenRound().sees_round()),
        ("shared", shared, True),
    ):
        rounds = [(length, Forced()) for length in (12, 23)]
        chains = draft(head, Reading.of(head, tokens), rounds, k=3, t=2, own=own)
        drawn[name] = torch.stack([step.hidden_out for chain in chains for step in chain.steps])
    assert torch.allclose(drawn["unseen"], drawn["shared"], rtol=0, atol=1e-10)
    assert (drawn["plain"] - drawn["unseen"]).abs().max() > 1e-2
