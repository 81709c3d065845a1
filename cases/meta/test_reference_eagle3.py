"""The EAGLE-3 reference against a head assembled from Hugging Face modules by the names of published files."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from cases.checkpoints import make
from cases.meta.files import edit_json
from cases.meta.published import tokens_of
from cases.oss_weights import HalfOssRecipe
from cases.pairs import RECIPES
from cases.trained_weights import TrainedRecipe
from reference.attention import Sight
from reference.checkpoint import CheckpointError
from reference.eagle1 import DraftHead, read_draft
from reference.eagle3 import LAYERS, Eagle3Head, Variant
from reference.keys import Keys
from reference.pairs import load_head
from reference.pairs import paper_target as load_llama

CLOSE = 2e-5
PAIRS = sorted(
    name
    for name, recipe in RECIPES.items()
    # of float16 (test_trained_weights), and the weights of others (test_families)
    if recipe.algorithm == "EAGLE3" and not isinstance(recipe, TrainedRecipe | HalfOssRecipe)
)


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, made_pair):
    return made_pair(request.param)


@pytest.fixture
def tiny(made_pair):
    return made_pair("eagle3-tiny")


class MidLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, rows, bias=False))
        self.mlp = LlamaMLP(config)


class Assembled(nn.Module):
    """Published names, Hugging Face arithmetic. `vocab` logits are over the draft's own ids."""

    def __init__(self, folder, features):
        super().__init__()
        raw = json.loads((folder / "config.json").read_text())
        config = LlamaConfig.from_pretrained(folder, attn_implementation="eager")
        tensors = load_file(folder / "model.safetensors")
        self.raw, self.rotary = raw, LlamaRotaryEmbedding(config)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, raw["draft_vocab_size"], bias=False)
        if "embed_tokens.weight" in tensors:
            self.embed_tokens = nn.Embedding(raw["vocab_size"], config.hidden_size)
        for name in ("d2t", "t2d"):
            if name in tensors:
                self.register_buffer(name, tensors[name])
        missing = self.load_state_dict(tensors, strict=False)
        assert missing.unexpected_keys == []
        assert all("rotary" in name for name in missing.missing_keys), missing

    def forward(self, embeds, hidden, mask):
        layer, rows = self.midlayer, len(embeds)
        positions = torch.arange(rows)[None]
        bias = torch.zeros(rows, rows).masked_fill(~mask, float("-inf"))[None, None]
        normed = layer.hidden_norm(hidden)
        read = torch.cat((layer.input_layernorm(embeds), normed), dim=-1)[None]
        attended, _ = layer.self_attn(
            read, position_embeddings=self.rotary(read, positions), attention_mask=bias, past_key_values=None
        )
        x = (normed if self.raw.get("norm_before_residual") else hidden) + attended[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))


def features_by_hf(folder, tokens, layers):
    """Outputs of the named layers side by side: HF's hidden_states[i + 1] is the output of layer i."""
    hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        states = hf.model(tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layers], dim=-1), hf


def layers_of(name):
    recipe = RECIPES[name]
    # "low, middle, high": what layers 2, 8/2 and 8-3 read is what the ones before them wrote
    return recipe.aux_layers if recipe.aux_layers is not None else (1, 3, 4)


@pytest.mark.parametrize("length", [1, 2, 40])
def test_features_states_and_logits_equal_the_assembled_head(pair, length):
    tokens = tokens_of(length + 1, 512, seed=length)
    target = load_llama(pair.target)
    head = Eagle3Head.load(pair.draft, target)
    theirs, hf = features_by_hf(pair.target, tokens[:-1], layers_of(pair.name))
    mine = head.features(target.hidden_states(tokens[:-1]))
    assert torch.allclose(mine, theirs, rtol=0, atol=CLOSE), "the features are not those layers' outputs"

    assembled = Assembled(pair.draft, theirs.shape[1])
    embedding = getattr(assembled, "embed_tokens", hf.model.embed_tokens)
    with torch.no_grad():
        entered = assembled.fc(theirs)
        g = assembled(embedding(tokens[1:]), entered, Sight.causal(length).mask(slice(0, length), 0))
        own = assembled.lm_head(assembled.norm(g))
    mine_g, _ = head.forward(tokens[1:], head.enter(mine), torch.arange(length), Sight.causal(length))
    assert torch.allclose(head.enter(mine), entered, rtol=0, atol=CLOSE), "fc differs"
    assert torch.allclose(mine_g, g, rtol=0, atol=CLOSE), "the layer differs"

    logits = head.logits(mine_g)
    shift = getattr(assembled, "d2t", torch.zeros(own.shape[1], dtype=torch.int64))
    proposable = torch.arange(own.shape[1]) + shift
    assert torch.allclose(logits[:, proposable], own, rtol=0, atol=10 * CLOSE), "the head differs"
    vocab = RECIPES[pair.name].vocab
    others = [token for token in range(vocab) if token not in set(proposable.tolist())]
    assert (logits[:, others] == float("-inf")).all(), "tokens outside the draft vocabulary can be proposed"
    assert len(others) == vocab - RECIPES[pair.name].draft_vocab


def test_t2d_marks_exactly_the_tokens_d2t_leads_to(tiny):
    tensors = load_file(tiny.draft / "model.safetensors")
    reached = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == reached.tolist()
    assert (tensors["d2t"] != 0).sum() > 300, "offsets of zero would hide a map that is not applied"


def rewritten(pair, place, config=None, tensors=None):
    """A copy of the draft folder with changed config values and tensors."""
    shutil.copytree(pair.draft, place)
    edit_json(place / "config.json", **(config or {}))
    save_file(load_file(place / "model.safetensors") | (tensors or {}), place / "model.safetensors")
    return place


#: What older files call the norms of three features.
OLDER_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
#: What NVIDIA's trainer writes into eagle_config beside the layers.
OF_NVIDIA = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}
#: What trainers copy out of a target's config into that of its head.
OF_A_TARGET = {
    "target_model_type": "qwen3_vl",
    "modal_type": "VLM",
    "image_token_id": 5,
    "decoder_sparse_step": 1,
    "use_mrope": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}


@pytest.mark.parametrize(
    "config",
    [
        OF_A_TARGET,
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        {"eagle_config": OF_NVIDIA},
        {"eagle_config": OF_NVIDIA | {"eagle_aux_hidden_state_layer_ids": []}},
    ],
)
def test_what_trainers_write_beside_a_head_changes_nothing(tiny, tmp_path, config):
    for one, other in zip(
        answers(tiny, tiny.draft), answers(tiny, rewritten(tiny, tmp_path / "d", config)), strict=True
    ):
        assert torch.equal(one, other)


def uneven(*shape, seed=5):
    """Norm weights that are not one, which would hide a norm that is left out or put elsewhere."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def answers(pair, folder):
    tokens, target = tokens_of(31, 512), load_llama(pair.target)
    head = Eagle3Head.load(folder, target)
    features = head.features(target.hidden_states(tokens[:-1]))
    g, _ = head.forward(tokens[1:], head.enter(features), torch.arange(30), Sight.causal(30))
    return features, head.enter(features), g, head.logits(g)


def test_the_residual_may_start_after_the_norm(tiny, tmp_path):
    folder = rewritten(
        tiny, tmp_path / "d", {"norm_before_residual": True}, {"midlayer.hidden_norm.weight": uneven(64)}
    )
    features, entered, g, _ = answers(tiny, folder)
    assembled, hf = Assembled(folder, features.shape[1]), AutoModelForCausalLM.from_pretrained(tiny.target)
    with torch.no_grad():
        theirs = assembled(
            hf.model.embed_tokens(tokens_of(31, 512)[1:]), entered, Sight.causal(30).mask(slice(0, 30), 0)
        )
    assert torch.allclose(g, theirs, rtol=0, atol=CLOSE)
    plain = rewritten(tiny, tmp_path / "p", {}, {"midlayer.hidden_norm.weight": uneven(64)})
    assert not torch.allclose(answers(tiny, plain)[2], g, atol=1e-2), "the switch changes nothing"


def test_an_embedding_may_stand_beside_names_that_begin_with_model(tiny, tmp_path):
    own = {"embed_tokens.weight": uneven(512, 64)}
    plain = rewritten(tiny, tmp_path / "p", {}, own)
    folder = rewritten(tiny, tmp_path / "d")
    outside = ("lm_head.weight", "d2t", "t2d")
    tensors = load_file(folder / "model.safetensors").items()
    save_file(
        {name if name in outside else f"model.{name}": one for name, one in tensors} | own, folder / "model.safetensors"
    )
    for mine, theirs in zip(answers(tiny, folder), answers(tiny, plain), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("key", "names"), [("fc_norm", ("fc_norm.0", "fc_norm.1", "fc_norm.2")), ("use_aux_norm", OLDER_NORMS)]
)
def test_each_feature_may_have_a_norm_of_its_own(tiny, tmp_path, key, names):
    norms = {f"{name}.weight": uneven(64, seed=i) for i, name in enumerate(names)}
    folder = rewritten(tiny, tmp_path / "d", {key: True, "num_aux_hidden_states": 3}, norms)
    features, entered, _, _ = answers(tiny, folder)
    parts = []
    for part, weight in zip(features.split(64, dim=-1), norms.values(), strict=True):
        norm = LlamaRMSNorm(64, eps=1e-6)
        norm.weight.data = weight
        parts.append(norm(part))
    fc = load_file(folder / "model.safetensors")["fc.weight"]
    assert torch.allclose(entered, (torch.cat(parts, dim=-1) @ fc.T).detach(), rtol=0, atol=CLOSE)


def test_all_features_may_be_normed_together(tiny, tmp_path):
    folder = rewritten(
        tiny, tmp_path / "d", {"eagle_config": {"norm_before_fc": True}}, {"input_norm.weight": uneven(192)}
    )
    features, entered, _, _ = answers(tiny, folder)
    norm = LlamaRMSNorm(192, eps=1e-6)
    norm.weight.data = uneven(192)
    fc = load_file(folder / "model.safetensors")["fc.weight"]
    assert torch.allclose(entered, (norm(features) @ fc.T).detach(), rtol=0, atol=CLOSE)


def test_the_state_handed_on_may_be_normed(tiny, tmp_path):
    weight = {"norm.weight": uneven(64)}
    plain = answers(tiny, rewritten(tiny, tmp_path / "p", {}, weight))
    normed = answers(tiny, rewritten(tiny, tmp_path / "d", {"norm_output": True}, weight))
    norm = LlamaRMSNorm(64, eps=1e-6)
    norm.weight.data = weight["norm.weight"]
    assert torch.allclose(normed[2], norm(plain[2]).detach(), rtol=0, atol=CLOSE)
    assert torch.allclose(normed[3], plain[3], rtol=0, atol=10 * CLOSE), "its logits are the same"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 1, 3]}}, r"\[5, 1, 3\] do not name ascending"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7]}}, r"ascending layers 0\.\.6"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, "whether these layers' inputs or"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, r"ascending layers 0\.\.6"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4; expected 3"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"target_hidden_size": 32}, "target hidden size is 32; expected the target's 64"),
        ({"vocab_size": 400}, "vocab_size is 400; expected the target's 512"),
        ({"draft_vocab_size": 400}, r"lm_head.weight' has shape \(432, 64\); expected \(400, 64\)"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; expected layers.0 and on"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, r"fc.weight' has shape \(64, 192\)"),
    ],
)
def test_a_head_that_does_not_fit_says_where_and_what_was_expected(tiny, tmp_path, config, words):
    folder = rewritten(tiny, tmp_path / "d", config)
    with pytest.raises(CheckpointError, match=words) as caught:
        Eagle3Head.load(folder, load_llama(tiny.target))
    assert str(folder) in str(caught.value)


def test_layers_that_heads_of_a_kind_of_target_name_either_way_are_not_guessed(tiny):
    target = load_llama(tiny.target)
    keys, config = Keys(tiny.draft, {"eagle_config": {LAYERS: [2, 3, 4]}}), read_draft(tiny.draft)[0]
    assert Variant.read(keys, config, target).states == (3, 4, 5)
    target.config = dataclasses.replace(target.config, architecture="DeepseekV3ForCausalLM")
    with pytest.raises(CheckpointError, match="is said nowhere"):
        Variant.read(keys, config, target)
    keys = Keys(tiny.draft, {"eagle_config": {LAYERS: [1, 2, 3]}})
    assert Variant.read(keys, config, target).states == (2, 3, 4)


def test_a_map_that_leads_twice_to_one_token_or_nowhere_is_refused(tiny, tmp_path):
    d2t = load_file(tiny.draft / "model.safetensors")["d2t"]
    twice, outside = d2t.clone(), d2t.clone()
    twice[1] = d2t[0] - 1
    outside[-1] += 512
    for number, bad in enumerate((twice, outside)):
        folder = rewritten(tiny, tmp_path / str(number), {}, {"d2t": bad})
        with pytest.raises(CheckpointError, match="d2t does not lead to 432 different target ids"):
            Eagle3Head.load(folder, load_llama(tiny.target))


def test_a_default_needs_layers_enough_to_tell_low_middle_and_high_apart(tiny, tmp_path):
    folder = rewritten(tiny, tmp_path / "d")
    target = load_llama(tiny.target)
    target.layers = 5
    with pytest.raises(CheckpointError, match="the default layers do not name ascending"):
        Eagle3Head.load(folder, target)


def test_a_folder_is_read_by_its_architecture(tiny, tmp_path):
    target = load_llama(tiny.target)
    assert isinstance(load_head(tiny.draft, target), Eagle3Head)
    plain = make("eagle-tiny", tmp_path)
    assert isinstance(load_head(plain.draft, load_llama(plain.target)), DraftHead)
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM.*expected one of DeepseekV2ForCausalLM, "):
        load_head(tiny.target, target)


def two_layers(pair, place, **norms):
    """A copy of the draft folder with a second layer: a Llama layer, with these norms in front of its attention."""
    folder = rewritten(pair, place, {"num_hidden_layers": 2})
    first = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): own for name, own in first.items()}
    for name, own in first.items():
        if name.startswith("midlayer.") and "input_layernorm" not in name and "hidden_norm" not in name:
            width = 64 if own.dim() == 2 and own.shape[1] == 128 and "_proj" in name and "mlp" not in name else None
            tensors[name.replace("midlayer.", "layers.1.")] = (
                uneven(*own[:, :width].shape) / 9 if width else own.clone()
            )
    tensors |= {f"layers.1.{name}.weight": weight for name, weight in norms.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_norm_of_a_later_layer_is_the_one_its_file_holds(tiny, tmp_path):
    """vLLM writes an input_layernorm there, SGLang reads a hidden_norm."""
    vllm, sglang, other = (
        answers(tiny, two_layers(tiny, tmp_path / str(i), **{name: uneven(64, seed=seed)}))[2]
        for i, (name, seed) in enumerate((("input_layernorm", 7), ("hidden_norm", 7), ("hidden_norm", 8)))
    )
    assert torch.equal(vllm, sglang)
    assert not torch.allclose(sglang, other, atol=1e-3)
    both = two_layers(tiny, tmp_path / "both", input_layernorm=uneven(64), hidden_norm=uneven(64))
    with pytest.raises(CheckpointError, match=r"layers\.1\.\* has an input_layernorm and a hidden_norm"):
        Eagle3Head.load(both, load_llama(tiny.target))
