"""A user's pair as its files show it: what is read of them, what kind of pair it is, and what is said of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from cases import checkpoints, fixed
from cases.meta.command_line import call
from harness.archive.records import RunManifest
from harness.contract.requests import RequestSpec
from harness.contract.settings import SpecConfig
from harness.contract.usage import UsageError
from harness.driving import own_pair as own_pairs
from harness.driving.adapt import Wanted, adapted
from harness.driving.checkpoint_files import read_checkpoint
from harness.driving.own_pair import described, own_pair
from harness.driving.refusals import check_pair
from harness.driving.requests import sampling_of
from harness.driving.results import hardly_agrees
from reference.checkpoint import DamagedError, Weights


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path):
    """folder(name, config, tensors): a checkpoint folder; tensors: name -> shape."""

    def make(name, tensors, generation=None, **config):
        place = tmp_path / name
        place.mkdir()
        base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3}
        (place / "config.json").write_text(json.dumps(base | config))
        if generation is not None:
            (place / "generation_config.json").write_text(json.dumps(generation))
        save_file({key: np.zeros(shape, np.float32) for key, shape in tensors.items()}, place / "model.safetensors")
        return place

    return make


@pytest.fixture
def tiny(tmp_path):
    return checkpoints.make("eagle-tiny", tmp_path / "made")


def as_bin(source, place):
    """The same checkpoint in torch's own format."""
    from safetensors.torch import load_file

    place.mkdir()
    (place / "config.json").write_bytes((source / "config.json").read_bytes())
    torch.save(load_file(source / "model.safetensors"), place / "pytorch_model.bin")
    return place


def test_a_bin_shows_the_same_names_and_shapes_as_safetensors(tiny, tmp_path):
    one, other = (read_checkpoint("--draft", place) for place in (tiny.draft, as_bin(tiny.draft, tmp_path / "bin")))
    assert one.tensors == other.tensors
    assert (one.parameters, one.dtype) == (other.parameters, other.dtype) == (one.parameters, "float32")


def test_a_bin_of_torchs_old_kind_is_read_by_whoever_can(tiny, tmp_path):
    place = as_bin(tiny.draft, tmp_path / "old")
    state = torch.load(place / "pytorch_model.bin", weights_only=True)
    torch.save(state, place / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert read_checkpoint("--draft", place).parameters is None


DRAFTS = {
    "EAGLE3 by its name": ({"architectures": ["LlamaForCausalLMEagle3"]}, {"fc.weight": (64, 192)}, "EAGLE3"),
    "EAGLE3 by its tensors": ({}, {"fc.weight": (64, 192), "d2t": (128,)}, "EAGLE3"),
    "EAGLE by its name": ({"architectures": ["LlamaForCausalLMEagle"]}, {"fc.weight": (64, 128)}, "EAGLE"),
    "EAGLE as it was published": ({}, {"fc.weight": (64, 128)}, "EAGLE"),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_pair_drafts_as_its_draft_does(folder, name):
    config, tensors, algorithm = DRAFTS[name]
    pair = own_pair(folder("target", {"lm_head.weight": (512, 64)}), folder("draft", tensors, **config))
    assert pair.algorithm == algorithm


@pytest.mark.parametrize(
    ("config", "tensors", "kind"),
    [
        ({"num_nextn_predict_layers": 1}, {"model.layers.3.eh_proj.weight": (64, 128)}, ("EAGLE", 1)),
        ({"architectures": ["Qwen3NextForCausalLM"]}, {"mtp.fc.weight": (64, 128)}, ("EAGLE", 1)),
        (
            {"architectures": ["MiMoV2ForCausalLM"]},
            {f"model.mtp.layers.{n}.eh_proj.weight": (64, 128) for n in range(3)},
            ("MTP", 3),
        ),
    ],
    ids=["by-config", "by-tensors", "multi-layer"],
)
def test_a_targets_own_mtp_layers_draft_where_no_draft_is_named(folder, config, tensors, kind):
    target = folder("target", tensors, **config)
    alone, named = own_pair(target, None), own_pair(target, target)
    assert (alone.algorithm, alone.layers) == kind
    assert alone.facts() == named.facts()
    assert alone.facts()["draft"]["layers"] == kind[1]
    assert alone.facts()["draft"]["parameters"] == sum(math.prod(shape) for shape in tensors.values())
    assert "the target's own MTP layers" in described(alone.facts())


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({}, None, ()),
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [9, 7]}, {"eos_token_id": 8}, (7, 8, 9)),
        ({"eos_token_id": None}, {"eos_token_id": [5]}, (5,)),
        ({"text_config": {"eos_token_id": 4}}, {}, (4,)),
        ({"eos_token_id": [511, 512], "vocab_size": 512}, {"eos_token_id": 999}, (511,)),  # those there are
    ],
)
def test_eos_is_what_both_files_name(folder, config, generation, eos):
    assert read_checkpoint("--target", folder("target", {"a": (1,)}, generation=generation, **config)).eos == eos


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8192),
        ({}, None),
    ],
)
def test_positions_are_those_sglang_boots_for(folder, config, positions):
    assert read_checkpoint("--target", folder("target", {"a": (1,)}, **config)).positions == positions


def test_a_request_ends_at_eos_unless_it_says_otherwise():
    plain, own = RequestSpec(rid="a", input_ids=(1,)), RequestSpec(rid="a", input_ids=(1,), stop_token_ids=(3,))
    ignoring = RequestSpec(rid="a", input_ids=(1,), ignore_eos=True)
    assert [one.stops((7,)) for one in (plain, own, ignoring)] == [(7,), (3, 7), ()]
    assert [sampling_of(one, (7,))["ignore_eos"] for one in (plain, own, ignoring)] == [False, False, True]
    assert [sampling_of(one)["ignore_eos"] for one in (plain, own, ignoring)] == [True, False, True]
    with pytest.raises(ValueError, match="SGLang then ignores too"):
        RequestSpec(rid="a", input_ids=(1,), stop_token_ids=(3,), ignore_eos=True)


def test_facts_name_both_folders_with_their_digests_and_a_manifest_keeps_them(tiny):
    facts = own_pair(tiny.target, tiny.draft).facts()
    assert set(facts["target"]["sha256"]) == {"config.json", "model.safetensors"}
    said = described(facts)
    assert "target LlamaForCausalLM: 0.21 M parameters in float32" in said
    assert "hidden 64, 3 layers, vocabulary 512" in said
    kept = RunManifest(store_version=1, run_id="a", created="b", pair=facts)
    assert kept.known_pair() == facts


def test_a_digest_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"one")
    first = own_pairs.sha256_of(file)
    monkeypatch.setattr(own_pairs.plain_files, "sha256", lambda *_: pytest.fail("read again"))
    assert own_pairs.sha256_of(file) == first
    monkeypatch.undo()
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    file.write_bytes(b"other")
    assert own_pairs.sha256_of(file) != first


def judged(counts, steps=3):
    scenario = fixed.default_scenarios()[0].model_copy(
        update={"spec": SpecConfig(num_steps=steps, num_draft_tokens=steps + 1)}
    )
    return SimpleNamespace(accepted=Counter(counts), scenario=scenario)


def test_a_draft_that_is_next_to_never_accepted_is_said():
    assert hardly_agrees([judged({1: 113, 2: 1})]) == [
        "the draft hardly ever agrees: accept length 1.01 of 4; a wrong chain cannot show in it"
    ]
    assert hardly_agrees([judged({1: 56}), judged({1: 57, 4: 1})])
    assert not hardly_agrees([judged({1: 100, 2: 5})])  # it agrees now and then
    assert not hardly_agrees([judged({1: 20})])  # too few to say so
    assert not hardly_agrees([])


def test_sizes_that_differ_are_no_pair(folder):
    target = folder("target", {"lm_head.weight": (512, 64)})
    wide = folder("draft", {"fc.weight": (32, 64)}, hidden_size=32)
    with pytest.raises(UsageError, match="hidden_size is 64 and 32"):
        own_pair(target, wide)
    head = folder("head", {"fc.weight": (32, 192)}, architectures=["LlamaForCausalLMEagle3"], hidden_size=32)
    assert own_pair(target, head).algorithm == "EAGLE3"  # whose width is its own


def test_a_draft_in_a_form_that_sglang_does_not_read_is_refused_for_that(folder):
    target = folder("target", {"lm_head.weight": (512, 64)})
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 64}}
    head = folder("head", {"fc.weight": (64, 192)}, architectures=["Eagle3Speculator"], vocab_size=None, **nested)
    with pytest.raises(UsageError, match="of the speculators library"):
        own_pair(target, head)


def test_our_own_scenarios_keep_their_shape_on_a_users_pair(tiny):
    from harness.cli.programs import choose_scenarios

    pair = own_pair(tiny.target, tiny.draft)
    for scenario in (*choose_scenarios([], [], None, pair), *choose_scenarios(["pr25015"], [], None, pair)):
        assert all(request.stops((7,)) == request.stop_token_ids for request in scenario.requests)
    assert [one.id for one in choose_scenarios([], [])] == [one.id for one in fixed.default_scenarios()]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor is 'two'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [5, -2]}, "eos_token_id is"),
    ],
)
def test_what_is_no_number_of_its_kind_is_refused_by_its_key(folder, config, names):
    with pytest.raises(UsageError, match=names) as refused:
        read_checkpoint("--target", folder("odd", {"lm_head.weight": (4, 4)}, **config))
    assert "allowed:" in str(refused.value)


@pytest.mark.parametrize("option", ["--target", "--draft"])
@pytest.mark.parametrize("said", [..., None, [], "LlamaForCausalLM", 7, [{"a": 1}], ["LlamaForCausalLM", 7], [""], {}])
def test_a_checkpoint_without_a_list_of_architectures_is_refused_with_a_line_to_add(folder, option, said):
    place = folder("odd", {"lm_head.weight": (4, 4)}, architectures=said if said is not ... else None)
    if said is ...:
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "architectures"}))
    with pytest.raises(UsageError, match="no list of names `architectures`") as refused:
        read_checkpoint(option, place)
    assert '  "architectures": ["Llama' in str(refused.value)
    assert ("(it is" in str(refused.value)) is (said is not ...)
    assert "unknown" not in str(refused.value)


def test_weights_that_are_not_finite_are_damaged(tmp_path):
    tensor = np.array([1.0, 70000.0], np.float32)
    save_file({"a": tensor, "b": tensor * np.nan}, tmp_path / "model.safetensors")
    assert Weights(tmp_path, torch.float32).take("a", 2).tolist() == tensor.tolist()
    for dtype, name, number in ((torch.float16, "a", "float16"), (torch.float32, "b", "float32")):
        with pytest.raises(DamagedError, match=f"{name!r} holds NaN or infinity in {number}"):
            Weights(tmp_path, dtype).take(name, 2)


@pytest.mark.parametrize("option", ["--arrivals", "--max-new-tokens", "--seed"])
def test_an_option_of_prompts_alone_is_refused_without_them(option):
    done = call("run", option, "2")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{option} belongs to --prompts" in done.stderr


def test_graph_sizes_without_graphs_are_refused():
    with pytest.raises(UsageError, match="no scenario runs in CUDA graphs"):
        adapted([fixed.default_scenarios()[0]], Wanted(cuda_graph_max_bs=2), device="cpu")


def test_a_pair_of_a_kind_that_a_release_does_not_run_is_refused_before_its_boot(tmp_path):
    made = checkpoints.make("hybrid-tiny", tmp_path)
    own = own_pair(made.target, made.draft)
    with pytest.raises(UsageError, match=r"model_type is 'qwen3_next'(.|\n)*a release from 0\.5\.17 on"):
        check_pair(own, SimpleNamespace(version="0.5.13", package=None), device="cpu")
    for version, device in (("0.5.17", "cpu"), ("0.5.17", "cuda")):
        check_pair(own, SimpleNamespace(version=version, package=None), device=device)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"index_topk": 2048}, "index_topk in config.json asks for a sparse attention indexer"),
        ({"layer_types": ["linear_attention"]}, "layer_types in config.json asks for linear attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is 'fp8'"),
    ],
)
def test_what_sglang_computes_on_a_gpu_alone_is_refused_on_a_cpu(folder, config, why):
    target = folder("target", {"lm_head.weight": (512, 64)}, **config)
    draft = folder("draft", {"fc.weight": (64, 128)})
    done = call("run", "--target", target, "--draft", draft)
    assert (done.exit_code, why in done.stderr, "--device cuda" in done.stderr) == (2, True, True)


def test_a_pair_that_a_release_does_not_serve_is_refused_by_its_folder(folder, tmp_path):
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    release = SimpleNamespace(version="0.5.23", package=tmp_path / "sglang")
    pair = own_pair(folder("target", {"lm_head.weight": (512, 64)}), folder("draft", {"fc.weight": (64, 128)}))
    (models / "llama.py").write_text("class LlamaForCausalLM(nn.Module):\n    pass\n")
    with pytest.raises(UsageError, match=r"target: SGLang 0\.5\.23 does not speculate with LlamaForCausalLM"):
        check_pair(pair, release, device="cpu")
    check_pair(None, release, device="cpu")


def test_a_model_that_reads_images_without_what_prepares_them_serves_its_text_alone(folder):
    target = folder("target", {"lm_head.weight": (512, 64)}, vision_config={"depth": 1})
    draft = folder("draft", {"fc.weight": (64, 128)})
    pair = own_pair(target, draft)
    assert (pair.target.text_alone, pair.draft.text_alone) == (True, False)
    (target / "preprocessor_config.json").write_text("{}")
    assert not own_pair(target, draft).target.text_alone
