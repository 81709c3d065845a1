"""The reference models against Hugging Face transformers, which share no code with them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from cases.hybrid_weights import HybridRecipe
from cases.mamba_weights import MambaRecipe
from cases.meta.files import edit_json
from cases.meta.published import assert_like_hf, tokens_of
from cases.mla_weights import LatentRecipe
from cases.pairs import RECIPES
from cases.table_weights import TableRecipe
from cases.trained_weights import TrainedRecipe
from reference.attention import Sight
from reference.checkpoint import CheckpointError
from reference.eagle1 import DraftHead
from reference.pairs import paper_target as load_llama

#: The limit the issue sets for float32 logits and hidden states.
CLOSE = 1e-5


#: EAGLE-1 pairs whose target is a Llama or Qwen3; latent attention, recurrent states and trained pairs have test files
#: of their own.
PLAIN = [
    name
    for name, recipe in RECIPES.items()
    if recipe.algorithm == "EAGLE" and not isinstance(recipe, LatentRecipe | HybridRecipe | MambaRecipe | TrainedRecipe)
]


@pytest.fixture(scope="module", params=PLAIN)
def pair(request, made_pair):
    return made_pair(request.param)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 200])
def test_target_logits_and_every_hidden_state_equal_hf(pair, length):
    hf = AutoModelForCausalLM.from_pretrained(pair.target, attn_implementation="eager")
    target = load_llama(pair.target)
    assert_like_hf(target, hf, tokens_of(length, target.config.vocab, seed=length))


@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-3},
    ],
    ids=["tied", "one-kv-head", "wide-eps"],
)
def test_target_reads_any_plain_llama_that_hf_saves(tmp_path, options):
    torch.manual_seed(3)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    hf = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, initializer_range=0.3, **options)).eval()
    for name, weight in hf.named_parameters():
        if "norm" in name:  # HF starts them at one, which would hide a norm that ignores its weight
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    hf.save_pretrained(tmp_path)
    assert_like_hf(load_llama(tmp_path), hf, tokens_of(20, 50))


def test_draft_head_equals_an_hf_decoder_layer_without_its_input_norm(pair):
    target = load_llama(pair.target)
    head = DraftHead.load(pair.draft, target)
    config = LlamaConfig.from_pretrained(pair.draft, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, layer_idx=0)
    tensors = load_file(pair.draft / "model.safetensors")
    weights = {name.removeprefix("layers.0."): tensors[name] for name in tensors if name.startswith("layers.0.")}
    missing, unexpected = layer.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["input_layernorm.weight"], [])
    layer.input_layernorm = torch.nn.Identity()
    tokens, hidden = tokens_of(40, target.config.vocab), torch.randn(40, target.config.hidden)
    x = torch.cat((target.embed(tokens), hidden), dim=-1) @ tensors["fc.weight"].T + tensors["fc.bias"]
    positions = torch.arange(40)
    bias = torch.zeros(40, 40).masked_fill(~Sight.causal(40).mask(slice(0, 40), 0), float("-inf"))[None, None]
    with torch.no_grad():
        angles = LlamaRotaryEmbedding(config)(x, positions[None])
        theirs = layer(x[None], attention_mask=bias, position_embeddings=angles)
    mine, _ = head.forward(tokens, hidden, positions, Sight.causal(40))
    assert torch.allclose(mine, theirs[0], rtol=0, atol=CLOSE), "the draft head differs from fc + HF layer"
    assert torch.equal(head.logits(mine), target.logits(mine)), "the draft must speak through the target's head"


def test_float64_agrees_with_float32_far_below_a_margin(pair):
    single, double = load_llama(pair.target), load_llama(pair.target, torch.float64)
    tokens = tokens_of(100, single.config.vocab)
    a, b = single.logits(single.forward(tokens)), double.logits(double.forward(tokens))
    assert b.dtype == torch.float64
    assert torch.allclose(a.double(), b, rtol=0, atol=1e-4)


def test_rows_see_nothing_after_them_and_only_relative_positions_matter(pair):
    target = load_llama(pair.target, torch.float64)
    tokens, positions = tokens_of(30, target.config.vocab), torch.arange(30)
    plain = target.forward(tokens)
    assert torch.allclose(target.forward(tokens[:11]), plain[:11], rtol=0, atol=1e-12)
    assert torch.allclose(target.forward(tokens, positions + 5), plain, rtol=0, atol=1e-10)
    moved = positions + (positions >= 29)
    shift = (target.forward(tokens, moved) - plain)[29].abs().max()
    if isinstance(RECIPES[pair.name], TableRecipe):
        assert shift == 0  # its tokens say where they stand; attention adds nothing
    else:
        assert shift > 1e-2


def copy_pair(pair, place):
    shutil.copytree(pair.root, place)
    return place / "target", place / "draft"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, ["architectures", "Nobodys", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type", "dynamic", "default", "yarn"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5", "whole heads"]),
        ({"logits_scaling": 3.0}, ["logits_scaling is 3.0", "does not know what that changes"]),
        ({"rope_parameters": {"rope_theta": 1e4, "alpha": 2}, "rope_theta": None}, ["rope_parameters.alpha is 2"]),
        ({"hidden_size": 32, "head_dim": 32}, ["layers.0.input_layernorm", "({hidden_size},)", "expected (32,)"]),
        ({"num_hidden_layers": 9}, ["no tensor", "layers.{num_hidden_layers}", "expected shape"]),
    ],
)
def test_a_target_that_cannot_be_read_says_where_what_and_what_was_expected(pair, tmp_path, changes, words):
    target, _ = copy_pair(pair, tmp_path / "copy")
    sizes = json.loads((target / "config.json").read_text())
    edit_json(target / "config.json", **changes)
    with pytest.raises(CheckpointError) as caught:
        load_llama(target)
    assert all(word.format(**sizes) in str(caught.value) for word in [str(target), *words]), str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 17, r"17; expected the target's \d+: not a pair"),
        ("vocab_size", 17, r"17; expected the target's \d+: not a pair"),
        ("num_hidden_layers", 2, "no tensor 'layers.1."),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(pair, tmp_path, field, value, words):
    _, draft = copy_pair(pair, tmp_path / "copy")
    edit_json(draft / "config.json", **{field: value})
    with pytest.raises(CheckpointError, match=words):
        DraftHead.load(draft, load_llama(pair.target))


def test_target_and_draft_cannot_be_swapped(pair):
    with pytest.raises(CheckpointError, match="LlamaForCausalLMEagle"):
        load_llama(pair.draft)
    with pytest.raises(CheckpointError, match=r"no tensor 'layers\.0"):
        DraftHead.load(pair.target, load_llama(pair.target))


def test_missing_and_damaged_files_are_named(pair, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_llama(tmp_path / "nowhere")
    target, _ = copy_pair(pair, tmp_path / "copy")
    (target / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        load_llama(target)
    (target / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no .*safetensors file"):
        load_llama(target)
