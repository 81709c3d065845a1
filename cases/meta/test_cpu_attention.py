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


SPREAD = {
    "q_extend": torch.ones(2, 1, 1),
    "k_extend": torch.zeros(2, 1, 1),
    "v_extend": torch.tensor([[[4.0]], [[8.0]]]),
}
POOL = {"k_buffer": torch.zeros(3, 1, 1), "v_buffer": torch.tensor([[[1.0]], [[2.0]], [[3.0]]])}


def windowed(window, *, cached, **more):
    """Two queries over `cached` rows of POOL and SPREAD's own; all scores are equal, so a row is a mean of values."""
    rows = {"qo_indptr": torch.tensor([0, 2]), "sliding_window_size": window}
    return extended(cached=cached, **(SPREAD | POOL | rows | more)).flatten().tolist()


def test_a_sliding_window_ends_that_many_rows_before_each_query():
    assert windowed(-1, cached=3) == pytest.approx([(1 + 2 + 3 + 4) / 4, (1 + 2 + 3 + 4 + 8) / 5])
    assert windowed(2, cached=3) == pytest.approx([(2 + 3 + 4) / 3, (3 + 4 + 8) / 3])
    assert windowed(1, cached=1) == pytest.approx([(1 + 4) / 2, (4 + 8) / 2])


def test_a_mask_is_as_wide_as_the_sequence_where_the_window_left_its_first_rows_out():
    """Five rows and two queries that do not see each other; the window left three cached rows of them."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1]], dtype=torch.bool)
    given = {
        "custom_mask": mask.flatten(),
        "mask_indptr": torch.tensor([0, 14]),
        "window_kv_offsets": torch.tensor([2]),
    }
    assert windowed(3, cached=3, **given) == pytest.approx([(1 + 2 + 3 + 4) / 4, (2 + 3 + 8) / 3])


def test_a_sink_takes_its_share_and_adds_nothing():
    """Of one key with score 0 and a sink of ln 3 the key has a quarter."""
    one = {name: rows[:1] for name, rows in SPREAD.items()}
    out = extended(cached=0, **(one | POOL), sinks=torch.tensor([math.log(3)]))
    assert out.item() == pytest.approx(4.0 / 4)


@pytest.mark.parametrize(("scales", "reads"), [({}, 2.0), ({"k_scale": 2.0}, 2.6)])
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_quantized_pool_holds_rows_divided_by_a_scale_and_new_rows_are_whole(kind, scales, reads):
    """Two keys with scores 0 and ln 3 without a scale: shares 1/4 and 3/4; ln 9 with one: 1/10 and 9/10."""
    pool = {"k_buffer": torch.tensor([[[math.log(3)]], [[0.0]]]), "v_buffer": torch.tensor([[[3.0]], [[-1.0]]])}
    for v_scale in (None, 1.0, 0.5):
        told = scales | {"v_scale": v_scale}
        if kind == "decode":
            out = torch.zeros(1, 1, 1)
            plan = {"kv_indptr": torch.tensor([0, 2]), "kv_indices": torch.arange(2), "sm_scale": 1.0}
            cpu_attention.decode_attention({"q": torch.ones(1, 1, 1), "o": out} | plan | pool | told)
            expected = reads * (v_scale or 1.0)
        else:
            own = {"k_extend": torch.zeros(1, 1, 1), "v_extend": torch.tensor([[[-1.0]]])}
            out = extended(cached=1, q_extend=torch.ones(1, 1, 1), **own, **pool, **told)
            share = (reads + 1) / 4
            expected = share * 3 * (v_scale or 1.0) - (1 - share)
        assert out.item() == pytest.approx(expected, rel=1e-5)
