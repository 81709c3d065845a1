"""Targets that Hugging Face provides: against our own on families that both know, and against its models on others."""

import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from cases.checkpoints import make
from cases.meta.files import edit_json
from cases.meta.handmade import asking
from cases.meta.published import peak_of
from cases.meta.sessions import SPECS, assert_same_rows, request_of
from cases.meta.speculating import FreeSession
from harness.contract.requests import RequestSpec
from harness.driving.checkpoint_files import read_checkpoint
from harness.driving.footprint import footprint
from reference.attention import Sight
from reference.checkpoint import CheckpointError, read_json
from reference.eagle1 import DraftHead
from reference.hf_module import _taken_over
from reference.hf_target import HfTarget
from reference.pairs import load_pair, load_target
from reference.pairs import paper_target as load_llama

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
}
#: Family -> what its config has beside SIZES.
OTHERS = {
    "Gemma2": {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "Olmo2": {"tie_word_embeddings": False},
    "Granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "Phi3": {"pad_token_id": 0},
    "Cohere2": {"head_dim": 8, "sliding_window": 16, "logit_scale": 0.25},
    "StableLm": {},
    "Qwen3Next": {"head_dim": 8, "num_experts": 4, **EXPERTS, **DELTA},
}
OWN = {"Llama": {}, "Qwen3": {"head_dim": 8}}
SEES = {"hidden_size": 16, "intermediate_size": 32}
#: Those that read images too: what their text's config has beside SIZES, and that of their images; text alone is read.
WRAPPED = {
    "Qwen2_5_VL": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        SEES | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    ),
    "Mistral3": (
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        SEES | {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    ),
    "Gemma3": (
        {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
        SEES | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    ),
}
TOKENS = torch.randint(3, 97, (24,), generator=torch.Generator().manual_seed(1))
#: Two branches: parents, how many rows of the sequence each sees, and the branch's tokens.
BRANCHES = [(10, (-1, 0, 0, 1, 3)), (20, (-1, 0, 1))]
HANGING = torch.tensor([5, 6, 7, 8, 9, 11, 12, 13])
PLACES = torch.tensor([10, 11, 11, 12, 13, 20, 21, 22])
LINES = {4: (10, [5, 6, 8, 9]), 2: (10, [5, 7]), 0: (10, [5]), 7: (20, [11, 12, 13])}


def auto(family):
    return transformers.AutoModelForImageTextToText if family in WRAPPED else transformers.AutoModelForCausalLM


def written(folder, family, **more):
    """A checkpoint of random weights, large enough that every layer counts."""
    if family in WRAPPED:
        text, images = WRAPPED[family]
        more = {"text_config": SIZES | text, "vision_config": images}
    config = getattr(transformers, f"{family}Config")(**more if family in WRAPPED else SIZES | more)
    torch.manual_seed(5)
    module = auto(family).from_config(config)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    module.save_pretrained(folder)
    return module.eval()


@pytest.fixture(scope="module", params=[*OWN, *OTHERS, *WRAPPED])
def loaded(request, tmp_path_factory):
    """(folder, Hugging Face's own module, the target made of it)."""
    folder = tmp_path_factory.mktemp(request.param)
    module = written(folder, request.param, **(OWN | OTHERS).get(request.param, {}))
    return folder, module, HfTarget.load(folder)


@torch.inference_mode()
def test_states_and_logits_are_the_modules(loaded):
    _, module, target = loaded
    said = module(input_ids=TOKENS[None], output_hidden_states=True, use_cache=False)
    read = target.read(TOKENS, keep=range(target.layers + 1))
    assert read.rows == len(TOKENS)
    for i, state in enumerate(said.hidden_states):
        torch.testing.assert_close(read.states[i], state[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(read.states[target.layers]), said.logits[0], atol=1e-4, rtol=1e-4)
    behind = target.read(TOKENS[20:], keep=(1,), after=target.read(TOKENS[:20], keep=()))
    assert behind.rows == len(TOKENS)
    torch.testing.assert_close(behind.states[1], read.states[1][20:], atol=1e-4, rtol=1e-4)


def test_keys_that_a_class_takes_out_of_what_it_is_given_are_read(tmp_path):
    written(tmp_path, "Gemma3Text", **OTHERS["Gemma3Text"])
    edit_json(tmp_path / "config.json", sliding_window_pattern=6, cache_implementation="hybrid", qk_norm=True)
    assert HfTarget.load(tmp_path).layers == SIZES["num_hidden_layers"]


@torch.inference_mode()
def test_the_keys_of_a_text_may_stand_beside_those_of_its_images(tmp_path):
    module = written(tmp_path, "Qwen2_5_VL")
    raw = read_json(tmp_path / "config.json")
    text = {key: value for key, value in raw.pop("text_config").items() if key not in ("model_type", "layer_types")}
    older = {"rope_theta": text.pop("rope_parameters")["rope_theta"], "max_window_layers": 80}
    older |= {"sliding_window": 32768, "use_sliding_window": False}
    older["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(text | raw | older))
    target = HfTarget.load(tmp_path)
    read = target.read(TOKENS, keep=(target.layers,)).states[target.layers]
    said = module(input_ids=TOKENS[None], use_cache=False).logits[0]
    torch.testing.assert_close(target.logits(read), said, atol=1e-4, rtol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(text | raw | older | {"vision_layers": 3}))
    with pytest.raises(CheckpointError, match="vision_layers is 3"):
        HfTarget.load(tmp_path)
    with pytest.raises(ValueError, match=r"rope_theta is 5, and it reads 6"):
        _taken_over({"rope_theta": 5}, {"rope_parameters": {"rope_theta": 6}})


@torch.inference_mode()
def test_a_row_of_a_branch_says_what_its_line_says_as_a_sequence(loaded):
    _, module, target = loaded
    trunk = target.read(TOKENS, keep=(2, target.layers))
    found = target.branch(trunk, HANGING, PLACES, Sight.of(BRANCHES))
    assert found.keys() == {2, target.layers}
    for row, (seen, line) in LINES.items():
        whole = torch.tensor([*TOKENS[:seen].tolist(), *line])
        said = module(input_ids=whole[None], output_hidden_states=True, use_cache=False).hidden_states
        torch.testing.assert_close(found[2][row], said[2][0, -1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[target.layers][row], said[-1][0, -1], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_weights_are_held_once_and_computed_with_in_either_width(loaded):
    folder, _, _ = loaded
    target = HfTarget.load(folder, torch.float32, held=torch.bfloat16)
    for dtype, view in ((torch.float32, target), (torch.bfloat16, target.computing(torch.bfloat16))):
        module = auto(
            read_json(folder / "config.json")["architectures"][0].removesuffix("ForConditionalGeneration")
        ).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
        module = module if dtype == torch.bfloat16 else module.float()  # .to(bfloat16) would round the rotation too
        said = module.eval()(input_ids=TOKENS[None], use_cache=False).logits[0]
        logits = view.logits(view.read(TOKENS, keep=(view.layers,)).states[view.layers])
        torch.testing.assert_close(logits, said, atol=1e-5, rtol=1e-5)
        assert view.embed(TOKENS).dtype == dtype
    assert {each.dtype for each in target.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", OWN)
@torch.inference_mode()
def test_it_says_what_our_own_target_says(tmp_path, family):
    written(tmp_path, family, **OWN[family])
    ours, theirs = load_llama(tmp_path), HfTarget.load(tmp_path)
    assert (ours.vocab, ours.hidden, ours.layers) == (theirs.vocab, theirs.hidden, theirs.layers)
    keep = range(ours.layers + 1)
    trunks = [target.read(TOKENS, keep=keep) for target in (ours, theirs)]
    branches = [
        target.branch(trunk, HANGING, PLACES, Sight.of(BRANCHES))
        for target, trunk in zip((ours, theirs), trunks, strict=True)
    ]
    for i in keep:
        torch.testing.assert_close(trunks[0].states[i], trunks[1].states[i], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(branches[0][i], branches[1][i], atol=1e-4, rtol=1e-4)
    last = trunks[0].states[ours.layers]
    torch.testing.assert_close(ours.logits(last), theirs.logits(last), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.embed(TOKENS), theirs.embed(TOKENS))


@pytest.mark.parametrize("spec", SPECS[:3:2], ids=["chain", "tree"])
def test_a_request_has_the_same_rows_whoever_provides_its_target(tmp_path, spec):
    pair = make("eagle-tiny", tmp_path)
    sessions = [
        FreeSession(target, DraftHead.load(pair.draft, target), spec)
        for target in (load_llama(pair.target), HfTarget.load(pair.target))
    ]
    request = request_of(random.Random(3), new=16)
    traces = [session.speculate(request, chunk=9) for session in sessions]
    assert_same_rows(*traces)
    assert [trace.header["providers"]["target"] for trace in traces] == ["paper", "transformers"]
    assert_same_rows(sessions[1].replay(asking(request, spec=spec), traces[0]), traces[0])


@pytest.mark.parametrize("prompt", [100, 600])
def test_the_memory_that_is_said_for_whole_sequences_is_kept(tmp_path, prompt):
    written(tmp_path / "target", "Olmo2", **OTHERS["Olmo2"] | {"max_position_embeddings": 1024})
    folders = [tmp_path / "target", eagle1(tmp_path / "draft")]
    request = RequestSpec(rid="a", input_ids=tuple(3 + i % 90 for i in range(prompt)), max_new_tokens=8)
    scenario = asking(request, spec=SPECS[0])
    files = [read_checkpoint(f"--{name}", folder) for name, folder in zip(("target", "draft"), folders, strict=True)]
    session = FreeSession(*load_pair(*folders), SPECS[0])
    trace = session.speculate(request)
    peak = peak_of(lambda: session.replay(scenario, trace))
    said = footprint(*files, [scenario], held="float32").mib
    assert peak <= said <= 30 + 3 * peak


def eagle1(folder, vocab=97):
    """A draft of random weights for a target of SIZES."""
    config = {**transformers.LlamaConfig(**SIZES).to_dict(), "architectures": ["LlamaForCausalLMEagle"]}
    config |= {"num_hidden_layers": 1, "vocab_size": vocab}
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    random_of = torch.Generator().manual_seed(9)
    shapes = {
        "fc.weight": (32, 64),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.mlp.gate_proj.weight": (64, 32),
        "layers.0.mlp.up_proj.weight": (64, 32),
        "layers.0.mlp.down_proj.weight": (32, 64),
    }
    save_file(
        {name: torch.randn(shape, generator=random_of) * 0.2 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize("spec", SPECS[:3:2], ids=["chain", "tree"])
def test_a_draft_over_it_is_lossless(tmp_path, spec):
    module = written(tmp_path / "target", "Olmo2", **OTHERS["Olmo2"])
    target, head = load_pair(tmp_path / "target", eagle1(tmp_path / "draft"))
    assert target.provider == "transformers"
    request = request_of(random.Random(2), 97, longest=12, new=10)
    trace = FreeSession(target, head, spec).speculate(request, chunk=5)
    text = list(request.input_ids)
    for _ in range(10):
        text.append(int(module(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    assert list(trace.ends[0].output_ids) == text[len(request.input_ids) :]


@pytest.mark.parametrize(
    ("family", "what"), [("Gemma2", "embedding"), ("Granite", "embedding"), ("Cohere2", "output head")]
)
def test_a_draft_that_shares_what_is_more_than_a_matrix_is_refused(tmp_path, family, what):
    written(tmp_path / "target", family, **OTHERS[family])
    with pytest.raises(CheckpointError, match=f"the draft has no {what} of its own"):
        load_pair(tmp_path / "target", eagle1(tmp_path / "draft"))


@torch.inference_mode()
def test_what_is_more_than_a_matrix_is_seen_by_the_module_itself(loaded):
    """The premise of the refusal: of these families alone a plain product is not what the module says."""
    _, module, target = loaded
    last = target.read(TOKENS, keep=(0, target.layers)).states
    plain = linear(last[target.layers], module.get_output_embeddings().weight)
    scaled = not torch.allclose(target.logits(last[target.layers]), plain, atol=1e-4)
    embedded = not torch.allclose(last[0], module.get_input_embeddings().weight[TOKENS], atol=1e-4)
    family = type(module).__name__
    assert (embedded, scaled) == (
        family.startswith(("Gemma", "Granite")),
        family.startswith(("Gemma2", "Granite", "Cohere")),
    )


def spoiled(folder, change=lambda _: None, **config):
    """The same folder with other keys or tensors."""
    edit_json(folder / "config.json", **config)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), {}, "missing keys: model.layers.2.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.2.extra.weight": torch.ones(2)}), {}, "leaves model.layers.2.extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), {}, "model.norm.weight"),
        (
            lambda t: t.update({"model.layers.2.self_attn.q_proj.bias": torch.ones(64)}),
            {"qkv_bias": True},
            "leaves model.layers.2.self_attn.q_proj.bias",
        ),
        (lambda t: None, {"partial_rotary_factr": 0.5}, "partial_rotary_factr is 0.5; transformers' Olmo2Config does"),
        (lambda t: None, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        (lambda t: None, {"model_type": "nothing"}, "transformers cannot read it"),
        (lambda t: None, {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_"),
        (lambda t: None, {"architectures": ["OlmoForCausalLM"]}, "its model_type is of Olmo2ForCausalLM"),
    ],
)
def test_a_folder_that_the_module_would_read_in_part_is_refused(tmp_path, change, config, said):
    written(tmp_path, "Olmo2", **OTHERS["Olmo2"])
    spoiled(tmp_path, change, **config)
    with pytest.raises(CheckpointError, match=said) as refused:
        load_target(tmp_path)
    assert "nor does transformers provide it" in str(refused.value)


def test_a_key_of_what_the_files_show_is_no_secret(tmp_path):
    written(tmp_path, "Olmo2", **OTHERS["Olmo2"])
    assert load_target(spoiled(tmp_path, qkv_bias=False)).provider == "transformers"


def test_layers_of_a_draft_in_its_folder_are_none_of_its_business(tmp_path):
    written(tmp_path, "Olmo2", **OTHERS["Olmo2"])
    drafts = {"mtp.fc.weight": torch.ones(2, 2), "model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    spoiled(tmp_path, lambda tensors: tensors.update(drafts))
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.eh_proj\.weight unread"):
        load_target(tmp_path)
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1)
    assert load_target(tmp_path).provider == "transformers"


def test_a_module_that_sees_what_comes_is_refused(tmp_path):
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="nor does transformers provide it"):
        load_target(tmp_path)


def test_rows_that_no_sequence_stands_for_are_refused(tmp_path):
    written(tmp_path, "Olmo2", **OTHERS["Olmo2"])
    target = HfTarget.load(tmp_path)
    trunk = target.read(TOKENS, keep=(target.layers,))
    for places, own in (
        (torch.tensor([10, 12]), None),
        (torch.tensor([10, 11, 12]), torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1]]).bool()),
    ):
        sight = Sight(upto=torch.full((len(places),), 10), own=own)
        with pytest.raises(ValueError, match="is no continuation of the rows that it sees"):
            target.branch(trunk, HANGING[: len(places)], places, sight)
