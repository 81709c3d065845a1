"""Every target architecture of the reference against Hugging Face's, over random tiny configs of its switches.

Hugging Face rotates, routes and keeps recurrent states in float32 even where weights are float64. How far that moves a
state is measured: it is of the size by which its float32 forward differs from its float64 forward.
"""

import json

import pytest
import torch

from cases.meta.published import FAMILIES, VOCAB, make_target
from reference.pairs import paper_target

ROWS = 70
#: How many configs are drawn of a family; those of the first four have most switches.
SEEDS = dict.fromkeys(FAMILIES, 4) | dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), 12)


@torch.no_grad()
def hf_states(hf, tokens):
    """All hidden states, and the logits."""
    out = hf(tokens[None], output_hidden_states=True, use_cache=False)
    return [*(one[0] for one in out.hidden_states), out.logits[0]]


@pytest.mark.parametrize(("family", "seed"), [(family, seed) for family in FAMILIES for seed in range(SEEDS[family])])
def test_every_state_and_all_logits_equal_hf(family, seed, tmp_path):
    hf = make_target(family, seed, tmp_path)
    target = paper_target(tmp_path, torch.float64)
    tokens = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(seed))
    theirs, rounded = hf_states(hf, tokens), hf_states(hf.float(), tokens)
    states = target.hidden_states(tokens)
    for i, (mine, exact, rough) in enumerate(zip([*states, target.logits(states[-1])], theirs, rounded, strict=True)):
        noise, size = (exact - rough).abs().max(), exact.abs().max()
        assert noise < 1e-4 * size, "an expert changed with the rounding: another seed says more"
        assert (mine - exact).abs().max() <= 4 * noise + 1e-7, f"state {i} of {len(states)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_as_transformers_5_writes_it_means_the_same(family, tmp_path):
    hf = make_target(family, 2, tmp_path)
    tokens, before = torch.arange(20), paper_target(tmp_path).hidden_states(torch.arange(20))
    names = json.loads((tmp_path / "config.json").read_text())["architectures"]
    hf.config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {"rope_parameters", "layers_block_type"} & set(written)
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": names}))
    for mine, other in zip(paper_target(tmp_path).hidden_states(tokens), before, strict=True):
        assert torch.equal(mine, other)
