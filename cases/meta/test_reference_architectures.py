"""Every target architecture of the reference against Hugging Face's, over random tiny configs of its switches."""

import pytest
import torch

from cases.meta.published import FAMILIES, VOCAB, make_target
from reference.pairs import load_target

torch.set_num_threads(1)

#: Hugging Face rotates and routes in float32 whatever the weights are.
CLOSE = 2e-5
ROWS = 70


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_state_and_all_logits_equal_hf(family, seed, tmp_path, record_property):
    hf = make_target(family, seed, tmp_path)
    target = load_target(tmp_path, torch.float64)
    tokens = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        theirs = hf(tokens[None], output_hidden_states=True, use_cache=False)
    states = target.hidden_states(tokens)
    off = [(mine - other[0]).abs().max().item() for mine, other in zip(states, theirs.hidden_states, strict=True)]
    off.append((target.logits(states[-1]) - theirs.logits[0]).abs().max().item())
    record_property("greatest_difference", max(off))
    assert max(off) < CLOSE * max(1.0, theirs.logits.abs().max().item()), off
