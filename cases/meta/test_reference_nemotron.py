"""What a Nemotron-H config may ask of the reference."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reference.attention import Sight
from reference.checkpoint import CheckpointError
from reference.pairs import load_pair, paper_target


@pytest.fixture(scope="module")
def folder(made_pair):
    return made_pair("hybrid-mamba").target


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"hybrid_override_pattern": "M-*M?"}, "the layers are 'M-*M?'"),
        ({"layers_block_type": ["mamba", "rwkv", "attention"]}, "the layers are"),
        ({"hybrid_override_pattern": "M-*ME"}, "n_routed_experts"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
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


@pytest.fixture(scope="module")
def with_experts(made_pair):
    return made_pair("hybrid-mamba-next").target


def test_experts_in_a_narrower_space_are_refused(with_experts, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(with_experts / "model.safetensors")
    config = json.loads((with_experts / "config.json").read_text()) | {"moe_latent_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="moe_latent_size is 40"):
        paper_target(tmp_path)


def test_experts_and_routing_are_hugging_faces(with_experts):
    tokens = list(range(3, 300, 5))
    module = AutoModelForCausalLM.from_pretrained(with_experts, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        theirs = module.eval()(torch.tensor([tokens])).logits[0]
    target = paper_target(with_experts, torch.float64)
    assert (target.logits(target.forward(tokens)) - theirs).abs().max() < 1e-5  # routing and states are float32 there


def test_a_row_of_the_next_token_layer_is_the_recipe_written_out(with_experts):
    """Norms of token and state, joined; attention; experts; a last norm. All by hand, for a text of one token."""
    target, head = load_pair(with_experts, with_experts, torch.float64)
    weights = {name: value.double() for name, value in load_file(with_experts / "model.safetensors").items()}

    def norm(x, name):
        return x / (x.square().mean() + 1e-5).sqrt() * weights[f"mtp.layers.{name}.weight"]

    def mlp(x, part):
        up, down = (weights[f"mtp.layers.1.mixer.{part}.{name}_proj.weight"] for name in ("up", "down"))
        return down @ (up @ x).relu().square()

    state = torch.linspace(-1, 2, target.hidden, dtype=torch.float64)
    token = weights["backbone.embeddings.weight"][7]
    x = weights["mtp.layers.0.eh_proj.weight"] @ torch.cat([norm(token, "0.enorm"), norm(state, "0.hnorm")])
    values = weights["mtp.layers.0.mixer.v_proj.weight"] @ norm(x, "0.norm")
    every = values.reshape(3, 64).repeat_interleave(2, dim=0).reshape(-1)  # six heads, two to a value; one row to see
    x = x + weights["mtp.layers.0.mixer.o_proj.weight"] @ every
    read = norm(x, "1.norm")
    score = (weights["mtp.layers.1.mixer.gate.weight"] @ read).sigmoid()
    x = x + mlp(read, "shared_experts")
    x = x + sum(1.5 * score[one] / score.sum() * mlp(read, f"experts.{one}") for one in range(5))
    said, _ = head.forward(torch.tensor([7]), state[None], torch.tensor([4]), Sight.causal(1))
    assert torch.allclose(said[0], norm(x, "1.final_layernorm"), rtol=0, atol=1e-6)
