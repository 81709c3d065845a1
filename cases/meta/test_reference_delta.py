"""The gated delta rule against Hugging Face's Qwen3-Next, which computes it in chunks of 64 rows by another formula."""

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from reference.attention import Sight
from reference.delta import DeltaMixer, DeltaSizes

HIDDEN = 24
#: A row's place is in the order of the rows.
POSITIONS = torch.empty(0)
SIZES = DeltaSizes(hidden=HIDDEN, key_heads=2, value_heads=4, key=8, value=6, conv=4, eps=1e-6)


class Named(dict):
    def take(self, name, *shape):
        assert tuple(self[name].shape) == shape, name
        return self[name]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(4)
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=4,
    )
    net = Qwen3NextGatedDeltaNet(config, 0).eval()
    for tensor in net.parameters():
        torch.nn.init.normal_(tensor, std=0.4)
    return net


@pytest.fixture(scope="module")
def mixer(net):
    return DeltaMixer(Named({name: value.detach().double() for name, value in net.state_dict().items()}), "", SIZES)


@pytest.fixture(scope="module")
def x():
    return torch.randn(90, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rows", [1, 3, 64, 90])
def test_a_sequence_equals_hf(net, mixer, x, rows):
    with torch.no_grad():
        theirs = net(x[None, :rows].float())[0]
    mine, _ = mixer.forward(x[:rows], POSITIONS, Sight.causal(rows), None)
    assert (mine - theirs).abs().max() < 1e-5 * theirs.abs().max(), "HF computes in float32"


def test_rows_in_parts_are_the_whole_sequence(mixer, x):
    whole, _ = mixer.forward(x, POSITIONS, Sight.causal(90), None)
    parts, kept, done = [], None, 0
    for rows in (1, 2, 40, 7, 40):
        said, kept = mixer.forward(x[done : done + rows], POSITIONS, Sight.causal(rows, kept=done), kept)
        parts.append(said)
        done += rows
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-12)


def test_a_branch_is_the_text_that_leads_to_it(mixer, x):
    """Two branches behind different rows, one of them a tree: each row as if its way had been the whole text."""
    _, kept = mixer.forward(x[:30], POSITIONS, Sight.causal(30), None)
    new = x[40:47]
    said, _ = mixer.forward(new, POSITIONS, Sight.of([(30, [-1, 0]), (11, [-1, 0, 0, 2]), (0, [-1])]), kept)
    ways = [(30, [0]), (30, [0, 1]), (11, [2]), (11, [2, 3]), (11, [2, 4]), (11, [2, 4, 5]), (0, [6])]
    for row, (before, way) in enumerate(ways):
        text = torch.cat((x[:before], new[way]))
        alone, _ = mixer.forward(text, POSITIONS, Sight.causal(len(text)), None)
        assert torch.allclose(said[row], alone[-1], rtol=0, atol=1e-12), row
