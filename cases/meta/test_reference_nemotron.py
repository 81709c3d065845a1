"""What a Nemotron-H config may ask of the reference."""

import json
import re

import pytest

from cases.checkpoints import make
from reference.checkpoint import CheckpointError
from reference.pairs import paper_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("hybrid-mamba", tmp_path_factory.mktemp("pairs")).target


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"hybrid_override_pattern": "M-*ME"}, "the layers are 'M-*ME'"),
        ({"layers_block_type": ["mamba", "moe", "attention"]}, "the layers are"),
        ({"use_bias": True}, "use_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"time_step_limit": [0.01, 0.5]}, "time_step_limit is"),
        ({"mamba_n_groups": 1}, "mamba_n_groups is 1; expected n_groups"),
        ({"rope_theta": 10000.0}, "does not know what that changes"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(folder, tmp_path, changed, why):
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changed))
    with pytest.raises(CheckpointError, match=re.escape(why)):
        paper_target(tmp_path)


def test_layers_are_named_in_a_list_too(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    del config["hybrid_override_pattern"]
    config["layers_block_type"] = ["mamba", "mlp", "full_attention", "linear_attention", "mlp"]
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (paper_target(tmp_path).forward(range(9)) == paper_target(folder).forward(range(9))).all()
