"""Which of a release's models can have a draft, by its sources, and which of its files our pairs need."""

import json
from pathlib import Path

import pytest

from cases.pairs import RECIPES, pair_of
from harness.contract.settings import EngineConfig, SpecConfig
from harness.engines.envs import EngineEnv
from harness.engines.launch import build_launch
from harness.engines.served_models import (
    ALL_FILES,
    FILES,
    OF_ANOTHER_CLASS,
    cannot_be_drafted_for,
    has_no_class,
    model_files,
)

BOTH = "def get_embed_and_head(self): ...\n    def set_eagle3_layers_to_capture(self, ids=None): ..."
SOURCES = {
    "llama": f"class LlamaForCausalLM(nn.Module):\n    {BOTH}\n",
    "phi": "from .llama import LlamaForCausalLM\nclass PhiForCausalLM(LlamaForCausalLM):\n    pass\n",
    "hybrid": "class HybridForCausalLM(nn.Module):\n    def get_embed_and_head(self): ...\n",
    "kimi": "class KimiLinearForCausalLM(nn.Module):\n    def forward(self): ...\n",
    "made": "class MadeForCausalLM(nn.Module):\n    get_embed_and_head = set_eagle3_layers_to_capture = given\n",
    "asks": "class AsksForCausalLM(nn.Module):\n    def __getattr__(self, name): ...\n",
    "else": "class ElseForCausalLM(somewhere.Model):\n    pass\n",
}


@pytest.fixture
def package(tmp_path):
    (tmp_path / "srt" / "models").mkdir(parents=True)
    for name, source in SOURCES.items():
        (tmp_path / "srt" / "models" / f"{name}.py").write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "eagle", "eagle3"),
    [
        ("Llama", "", ""),
        ("Phi", "", ""),
        ("Hybrid", "", "set_eagle3_layers_to_capture"),
        ("KimiLinear", "get_embed_and_head", "get_embed_and_head"),
        ("Made", "", ""),
        ("Asks", "", ""),
        ("Else", "", ""),
        ("Unknown", "", ""),
    ],
)
def test_a_class_that_lacks_what_drafts_ask_for_is_named_and_nothing_is_said_where_sources_do_not(
    package, name, eagle, eagle3
):
    for algorithm, missing in (("EAGLE", eagle), ("EAGLE3", eagle3), ("MTP", "")):
        why = cannot_be_drafted_for(f"{name}ForCausalLM", algorithm, version="0.5.23", package=package)
        assert (f"its class has no {missing}," in why) if missing else not why


def test_nothing_is_said_of_a_release_whose_sources_are_not_here():
    assert not cannot_be_drafted_for("KimiLinearForCausalLM", "EAGLE", version="0.5.23", package=None)


def test_an_architecture_that_no_file_lists_runs_as_another_or_not_at_all(package):
    more = package / "srt" / "models" / "lists.py"
    more.write_text(
        "class TransformersForCausalLM(nn.Module):\n    pass\n"
        "EntryClass = [LlamaForCausalLM, LlamaForCausalLMEagle, LlamaForCausalLMEagle3]\n"
    )
    release = {"version": "0.5.23", "package": package}
    why = cannot_be_drafted_for("SeedOssForCausalLM", "EAGLE", **release)
    assert "no class of that name, and TransformersForCausalLM has no get_embed_and_head" in why
    assert not cannot_be_drafted_for("LlamaForCausalLM", "EAGLE", **release)
    why = has_no_class("Eagle3LlamaForCausalLM", **release)
    assert "['Eagle3LlamaForCausalLM']" in why
    assert "one: LlamaForCausalLMEagle3;" in why
    assert not has_no_class("LlamaForCausalLMEagle3", **release)
    assert not has_no_class("Eagle3LlamaForCausalLM", version="0.5.23", package=None)


def _checkpoint(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(config)
    return folder


@pytest.fixture
def of_ours(package):
    """A release that has our pairs' classes where all have them."""
    for architecture, (name, *_) in FILES.items():
        with (package / "srt" / "models" / f"{name}.py").open("a") as file:
            file.write(f"class {architecture}(nn.Module):\n    pass\n")
    return package


@pytest.mark.parametrize("recipe", {type(one): one for one in RECIPES.values()}.values(), ids=lambda one: one.name)
def test_the_files_are_known_that_our_own_pairs_need(tmp_path, of_ours, recipe):
    pair = pair_of(recipe)
    target = _checkpoint(tmp_path / "target", json.dumps(pair.target_config))
    draft = _checkpoint(tmp_path / "draft", json.dumps(pair.draft_config))
    assert model_files(target, draft, package=of_ours) == ALL_FILES


@pytest.mark.parametrize("config", ['{"architectures": ["KimiLinearForCausalLM"]}', "{}", "no JSON", None])
def test_of_a_pair_that_nobody_knows_no_file_is_left_out(tmp_path, of_ours, config):
    known = _checkpoint(tmp_path / "known", '{"architectures": ["LlamaForCausalLM"]}')
    other = tmp_path / "gone" if config is None else _checkpoint(tmp_path / "other", config)
    assert model_files(known, known, package=of_ours) == ALL_FILES
    assert model_files(known, other, package=of_ours) == model_files(other, known, package=of_ours) == ()


def test_where_a_class_has_moved_or_nothing_is_on_disk_no_file_is_left_out(tmp_path, of_ours):
    llama = _checkpoint(tmp_path / "llama", '{"architectures": ["LlamaForCausalLM"]}')
    moved = _checkpoint(tmp_path / "moved", '{"architectures": ["GptOssForCausalLM"]}')
    models = of_ours / "srt" / "models"
    (models / "gpt_oss.py").rename(models / "gpt_oss_new.py")
    assert model_files(llama, package=of_ours) == ALL_FILES
    assert model_files(llama, moved, package=of_ours) == model_files(llama, package=None) == ()


@pytest.mark.parametrize("argument", [None, "stream_interval", *sorted(OF_ANOTHER_CLASS)])
def test_where_an_argument_may_name_another_class_no_file_is_left_out(tmp_path_factory, tmp_path, of_ours, argument):
    on_path = tmp_path_factory.mktemp("site")
    (of_ours / "__init__.py").touch()
    (on_path / "sglang").symlink_to(of_ours)
    llama = _checkpoint(tmp_path / "llama", '{"architectures": ["LlamaForCausalLM"]}')
    boot = build_launch(
        env=EngineEnv(version="0.5.23", python=Path("python"), pythonpath=(on_path,), torch="", ready=True),
        spec=SpecConfig(),
        engine=EngineConfig(server_args={} if argument is None else {argument: "x"}),
        target=llama,
        draft=llama,
    ).boot
    assert boot["model_files"] == ([] if argument in OF_ANOTHER_CLASS else list(ALL_FILES))
