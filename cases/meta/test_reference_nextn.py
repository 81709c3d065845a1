"""Next-token layers against Hugging Face's decoder layers, with the join of token and state around them.

Hugging Face has that join for families that store the layer behind the last one (`MtpLayer`). MiMo's and Qwen's are
written out here a second way, from MiMo's published modelling code and from DeepSeek-V3's equations 21 to 23.
"""

import pytest
import torch
from transformers.modeling_layers import MtpLayer

from cases.meta.published import HIDDEN, VOCAB, add_tensors, make_target, randomise
from reference.attention import Sight
from reference.checkpoint import CheckpointError
from reference.pairs import load_pair

torch.set_num_threads(1)

CLOSE = 2e-5
ROWS = 60


def published_layer(layer, prefix, experts):
    """A Hugging Face layer's tensors with experts one by one, as checkpoints have them."""
    named = {}
    for name, value in layer.state_dict().items():
        name = name.replace("post_norm", "shared_head.norm").replace("mtp_block.", "")
        if name == "mlp.experts.gate_up_proj":
            for e, one in enumerate(value):
                gate, up = one.chunk(2)
                named |= {f"mlp.experts.{e}.gate_proj.weight": gate, f"mlp.experts.{e}.up_proj.weight": up}
        elif name == "mlp.experts.down_proj":
            named |= {f"mlp.experts.{e}.down_proj.weight": one for e, one in enumerate(value)}
        else:
            named[name] = value
    return {f"{prefix}{name}": value.detach() for name, value in named.items()}


def layer_of(hf, index):
    """A decoder layer of the class of a model's last one, and the norm's class."""
    base = hf.get_decoder()
    return type(base.layers[-1]), type(base.norm)


@pytest.fixture
def behind(tmp_path):
    def make(family, seed):
        hf = make_target(family, seed, tmp_path)
        config, layers = hf.config, hf.config.num_hidden_layers
        layer_class, norm_class = layer_of(hf, layers)
        layer = MtpLayer(config, layer_class, norm_class, layers).double().eval()
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            randomise(name, tensor.data)
        prefix = f"model.layers.{layers}."
        copies = {"embed_tokens": hf.get_input_embeddings(), "shared_head.head": hf.get_output_embeddings()}
        add_tensors(
            tmp_path,
            published_layer(layer, prefix, 0)
            | {f"{prefix}{name}.weight": one.weight.detach().clone() for name, one in copies.items()},
        )
        return hf, layer

    return make


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_layer_behind_the_last_one_equals_hf(behind, tmp_path, family, seed):
    hf, layer = behind(family, seed)
    _, head = load_pair(tmp_path, tmp_path, torch.float64)
    tokens = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(seed))
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    positions = torch.arange(ROWS)
    hidden_mask = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    bias = torch.zeros(ROWS, ROWS, dtype=torch.float64).masked_fill(hidden_mask, float("-inf"))[None, None]
    with torch.no_grad():
        embedded = hf.get_input_embeddings()(tokens)[None]
        angles = hf.get_decoder().rotary_emb(embedded, positions[None])
        theirs = layer(embedded, hidden[None], angles, bias, positions[None], None)[0]
        logits = hf.get_output_embeddings()(theirs)
    mine, _ = head.forward(tokens, hidden, positions, Sight.causal(ROWS))
    assert (mine - theirs).abs().max() < CLOSE
    assert (head.logits(mine) - logits).abs().max() < CLOSE * 10


def test_a_layer_with_an_embedding_of_its_own_is_refused(behind, tmp_path):
    hf, _ = behind("deepseek_v3", 1)
    name = f"model.layers.{hf.config.num_hidden_layers}.embed_tokens.weight"
    add_tensors(tmp_path, {name: hf.get_input_embeddings().weight.detach() * 2})
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight' is not the target's"):
        load_pair(tmp_path, tmp_path)
