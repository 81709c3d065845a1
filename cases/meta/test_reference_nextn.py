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


def published_layer(layer, prefix):
    """A Hugging Face layer's tensors with experts one by one, as checkpoints have them."""
    named = {}
    for name, value in layer.state_dict().items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for e, one in enumerate(value):
                gate, up = one.chunk(2)
                named |= {f"mlp.experts.{e}.gate_proj.weight": gate, f"mlp.experts.{e}.up_proj.weight": up}
        elif name.endswith("mlp.experts.down_proj"):
            named |= {f"mlp.experts.{e}.down_proj.weight": one for e, one in enumerate(value)}
        else:
            named[name.replace("post_norm", "shared_head.norm").replace("mtp_block.", "")] = value
    return {f"{prefix}{name}": value.detach() for name, value in named.items()}


def randomised(module):
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        randomise(name, tensor.data)
    return module.double().eval()


def layer_of(hf, index):
    """A decoder layer of the class of a model's last one, and the norm's class."""
    base = hf.get_decoder()
    return type(base.layers[-1]), type(base.norm)


def surroundings(hf, tokens):
    """What a Hugging Face decoder layer gets beside rows: angles, a causal mask and positions."""
    rows, positions = len(tokens), torch.arange(len(tokens))[None]
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    mask = torch.zeros(rows, rows, dtype=torch.float64).masked_fill(later, float("-inf"))[None, None]
    return hf.get_decoder().rotary_emb(hf.get_input_embeddings()(tokens)[None], positions), mask, positions


def read_by_both(seed):
    """Tokens, and states as a target hands them over."""
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (ROWS,), generator=source)
    return tokens, torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=source)


@pytest.fixture
def behind(tmp_path):
    def make(family, seed):
        hf = make_target(family, seed, tmp_path)
        config, layers = hf.config, hf.config.num_hidden_layers
        layer_class, norm_class = layer_of(hf, layers)
        layer = randomised(MtpLayer(config, layer_class, norm_class, layers))
        prefix = f"model.layers.{layers}."
        copies = {"embed_tokens": hf.get_input_embeddings(), "shared_head.head": hf.get_output_embeddings()}
        add_tensors(
            tmp_path,
            published_layer(layer, prefix)
            | {f"{prefix}{name}.weight": one.weight.detach().clone() for name, one in copies.items()},
        )
        return hf, layer

    return make


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_layer_behind_the_last_one_equals_hf(behind, tmp_path, family, seed):
    hf, layer = behind(family, seed)
    _, head = load_pair(tmp_path, tmp_path, torch.float64)
    tokens, hidden = read_by_both(seed)
    with torch.no_grad():
        embedded = hf.get_input_embeddings()(tokens)[None]
        theirs = layer(embedded, hidden[None], *surroundings(hf, tokens), None)[0]
        logits = hf.get_output_embeddings()(theirs)
    mine, _ = head.forward(tokens, hidden, torch.arange(ROWS), Sight.causal(ROWS))
    assert (mine - theirs).abs().max() < CLOSE
    assert (head.logits(mine) - logits).abs().max() < CLOSE * 10


def test_a_layer_with_an_embedding_of_its_own_is_refused(behind, tmp_path):
    hf, _ = behind("deepseek_v3", 1)
    name = f"model.layers.{hf.config.num_hidden_layers}.embed_tokens.weight"
    add_tensors(tmp_path, {name: hf.get_input_embeddings().weight.detach() * 2})
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight' is not the target's"):
        load_pair(tmp_path, tmp_path)


#: By family: the next-token layer's prefix, its norms of token and state, its join and last norm, as published.
PARTS = {
    "mimo": (
        "model.mtp_layers.0.",
        "model.mtp_layers.0.token_layernorm",
        "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.final_layernorm",
    ),
    "qwen3_moe": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "qwen3_next": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "ernie": (
        "model.mtp_block.0.",
        "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
        "model.mtp_linear_proj.0",
        "model.norm",
    ),
}


def block_of(hf, family):
    """A decoder layer as the family's next-token layer has it: full attention; in ERNIE a dense MLP."""
    kinds = getattr(hf.config, "layer_types", None)
    index = kinds.index("full_attention") if family == "qwen3_next" else 0
    return randomised(type(hf.get_decoder().layers[-1])(hf.config, index))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", PARTS)
def test_a_layer_beside_the_others_equals_hf(tmp_path, family, seed):
    hf = make_target(family, seed, tmp_path)
    prefix, *names = PARTS[family]
    norm_class, size = type(hf.get_decoder().norm), HIDDEN
    token_norm, state_norm, last_norm = (
        randomised(norm_class(size, hf.config.rms_norm_eps)) if name != "model.norm" else hf.get_decoder().norm
        for name in (names[0], names[1], names[3])
    )
    block, join = block_of(hf, family), torch.randn(size, 2 * size, dtype=torch.float64) / size**0.5
    own = {names[0]: token_norm.weight, names[1]: state_norm.weight, names[2]: join, names[3]: last_norm.weight}
    own = {f"{name}.weight": value.detach().clone() for name, value in own.items() if name != "model.norm"}
    add_tensors(tmp_path, published_layer(block, prefix) | own)
    _, head = load_pair(tmp_path, tmp_path, torch.float64)
    tokens, hidden = read_by_both(seed)
    with torch.no_grad():
        embedded = hf.get_input_embeddings()(tokens)
        if family == "mimo":  # the token of the first row counts as zeros, and the state comes first
            embedded = torch.cat((torch.zeros(1, size, dtype=torch.float64), embedded[1:]))
            x = torch.cat((state_norm(hidden), token_norm(embedded)), dim=-1) @ join.T
        else:
            x = torch.cat((token_norm(embedded), state_norm(hidden)), dim=-1) @ join.T
        angles, mask, positions = surroundings(hf, tokens)
        theirs = last_norm(block(x[None], position_embeddings=angles, attention_mask=mask, position_ids=positions)[0])
    mine, _ = head.forward(tokens, hidden, torch.arange(ROWS), Sight.causal(ROWS))
    assert (mine - theirs).abs().max() < CLOSE
