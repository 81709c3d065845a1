"""The CPU replacement kernel for attention on rows small enough to work out by hand."""

import math

import pytest
import torch

from harness.engine_side.replacement_kernels import cpu_attention


def extended(*, cached, **arguments):
    """What an extend of one query writes, over `cached` rows of the pool and its own."""
    out = torch.zeros_like(arguments["q_extend"])
    pointers = {"qo_indptr": torch.tensor([0, 1]), "kv_indptr": torch.tensor([0, cached])}
    plan = pointers | {"kv_indices": torch.arange(cached)}
    mask = {
        "custom_mask": None,
        "mask_indptr": None,
        "is_causal": True,
        "sm_scale": 1.0,
        "kv_indices": torch.arange(cached),
    }
    cpu_attention.extend_attention({"o_extend": out} | plan | mask | arguments)
    return out


@pytest.mark.parametrize("pool_heads", [1, 2])
def test_an_extend_reads_as_many_heads_of_the_pool_as_its_layer_has(pool_heads):
    """One query of one head over one cached row and its own: scores 0 and ln 3, so shares 1/4 and 3/4."""
    pool = torch.full((1, pool_heads, 1), 9.0)  # what further heads hold is another layer's business
    values = pool.clone()
    pool[:, 0], values[:, 0] = 0.0, 8.0
    out = extended(
        cached=1,
        q_extend=torch.ones(1, 1, 1),
        k_extend=torch.full((1, 1, 1), math.log(3)),
        v_extend=torch.full((1, 1, 1), 4.0),
        k_buffer=pool,
        v_buffer=values,
    )
    assert out.item() == pytest.approx(8 / 4 + 4 * 3 / 4)


def test_an_extend_without_a_cached_prefix_does_not_look_at_the_pool():
    """Latent attention prefills with whole heads, two here, and stores one latent a row, of another width."""
    out = extended(
        cached=0,
        q_extend=torch.ones(1, 2, 1),
        k_extend=torch.zeros(1, 2, 1),
        v_extend=torch.tensor([[[3.0], [5.0]]]),
        k_buffer=torch.full((4, 1, 6), 9.0),
        v_buffer=torch.full((4, 1, 5), 9.0),
    )
    assert out.flatten().tolist() == [3.0, 5.0]  # one key, so each head says its own value
