"""Kept rows give what a forward over the whole sequence gives: chunks, single tokens and branches, for every layer."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases.checkpoints import make
from cases.meta.published import FAMILIES, make_target
from cases.meta.published_heads import BEHIND, BESIDE, make_pair
from cases.meta.speculating import FreeSession
from harness.contract.requests import RequestSpec
from harness.contract.settings import SpecConfig
from reference import attention
from reference.attention import KeyValues, Sight, ancestors, attend
from reference.mtp import MtpHead
from reference.pairs import load_pair, paper_target

DOUBLE = torch.float64


def naive(q, keys, values, mask, scale, sinks):
    """Softmax attention as it is defined, one query and head at a time."""
    (m, heads, _), each = q.shape, q.shape[1] // keys.shape[1]
    out = torch.zeros(m, heads, values.shape[2], dtype=q.dtype)
    for row in range(m):
        for head in range(heads):
            seen = mask[row].nonzero().flatten()
            power = (keys[seen, head // each] @ q[row, head] * scale).exp()
            total = power.sum() + (sinks[head].exp() if sinks is not None else 0.0)
            out[row, head] = (power[:, None] * values[seen, head // each]).sum(0) / total
    return out


@settings(max_examples=60, deadline=None)
@given(draw=st.data())
def test_attention_by_blocks_is_the_softmax_over_who_is_seen(draw):
    kept, m, groups = (draw.draw(st.integers(low, high)) for low, high in ((0, 7), (1, 6), (1, 2)))
    heads, window = groups * draw.draw(st.integers(1, 3)), draw.draw(st.none() | st.integers(1, 5))
    torch.manual_seed(draw.draw(st.integers(0, 99)))
    j = kept + m
    shapes = ((m, heads, 4), (j, groups, 4), (j, groups, 3))
    q, keys, values = (torch.randn(*shape, dtype=DOUBLE) for shape in shapes)
    sinks = torch.randn(heads, dtype=DOUBLE) if draw.draw(st.booleans()) else None
    parents = [draw.draw(st.integers(-1, row - 1)) for row in range(m)]
    seen = draw.draw(st.integers(0, kept))
    if draw.draw(st.booleans()):
        sight, mask = Sight.causal(m, kept=kept), torch.ones(j, j, dtype=torch.bool).tril()[kept:]
        positions = torch.arange(j)
    else:
        sight = Sight.of([(seen, parents)])
        depth = ancestors(parents).sum(1) - 1
        mask = torch.cat((torch.arange(kept).expand(m, kept) < seen, ancestors(parents)), dim=1)
        positions = torch.cat((torch.arange(kept), seen + depth))
    if window is not None:
        mask = mask & (positions[None] > positions[kept:, None] - window)
    held = KeyValues(keys=keys, values=values, positions=positions)
    before, attention.SCORES = attention.SCORES, draw.draw(st.sampled_from([1, heads * j * 2, 1 << 25]))
    try:
        mine = attend(q, held, sight, scale=0.7, window=window, sinks=sinks)
    finally:
        attention.SCORES = before
    torch.testing.assert_close(mine, naive(q, keys, values, mask, 0.7, sinks), rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("pairs")


def read_pair(name, root, dtype=DOUBLE, **held):
    """A pair of ours, or a random one of a published family; without a head where the family has none."""
    if name not in FAMILIES:
        pair = make(name, root)
        return load_pair(pair.target, pair.draft, dtype, **held)
    folder = root / name
    if name not in (*BEHIND, *BESIDE):
        make_target(name, 1, folder)
        return paper_target(folder, dtype, **held), None
    make_pair(name, 1, folder)
    return load_pair(folder, folder, dtype, **held)


NAMES = ["eagle-tiny", "qwen3-eagle", "eagle3-two", "eagle3-normed", "mla-tiny", "mtp-tiny", "mtp-chained"]


@pytest.fixture(scope="module")
def models(root):
    """Each read once."""
    return functools.cache(lambda name: read_pair(name, root))


@pytest.mark.parametrize("name", [*NAMES, *FAMILIES])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
@torch.inference_mode()
def test_chunks_single_tokens_and_branches_over_kept_rows_are_whole_sequences(models, name, draw):
    """A target and each layer of its head; a branch is a path of a tree, and alone it is a sequence like any other."""
    target, head = models(name)
    lengths = draw.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    text = torch.randint(target.vocab, (sum(lengths) + 6,), generator=torch.Generator().manual_seed(sum(lengths)))
    rows, path = sum(lengths), text[sum(lengths) :]
    seen = draw.draw(st.integers(1, rows))
    nodes = torch.tensor([3, *path.tolist()])  # the path hangs beside a foreign node, on rows 0..seen-1
    sight = Sight.of([(rows, (-1,)), (seen, tuple(range(-1, 5)))])
    positions = torch.tensor([rows, *range(seen, seen + 6)])

    keep, trunk, found = range(target.layers + 1), None, []
    for part in text[:rows].split(lengths):
        trunk = target.read(part, keep=keep, after=trunk)
        found.append(trunk.states)
    whole = target.hidden_states(text[:rows])
    alone = target.hidden_states(torch.cat((text[:seen], path)))
    hung = target.branch(trunk, nodes, positions, sight)
    for state in keep:
        torch.testing.assert_close(torch.cat([one[state] for one in found]), whole[state], rtol=0, atol=1e-9)
        torch.testing.assert_close(hung[state][1:], alone[state][seen:], rtol=0, atol=1e-9)

    for layer in head.layers if isinstance(head, MtpHead) else [head] if head else []:
        hidden = torch.randn(rows + 7, len(head.fc) if hasattr(head, "fc") else target.hidden, dtype=DOUBLE)
        kept, said, start = None, [], 0
        for part in text[:rows].split(lengths):
            own, places = slice(start, start + len(part)), torch.arange(start, start + len(part))
            g, kept = layer.forward(part, hidden[own], places, Sight.causal(len(part), kept=start), kept)
            said.append(g)
            start = own.stop
        one_go, _ = layer.forward(text[:rows], hidden[:rows], torch.arange(rows), Sight.causal(rows))
        torch.testing.assert_close(torch.cat(said), one_go, rtol=0, atol=1e-9)
        g, _ = layer.forward(nodes, hidden[rows:], positions, sight, kept)
        states, ids = torch.cat((hidden[:seen], hidden[rows + 1 :])), torch.cat((text[:seen], path))
        expected, _ = layer.forward(ids, states, torch.arange(seen + 6), Sight.causal(seen + 6))
        torch.testing.assert_close(g[1:], expected[seen:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_made_on_another_device_than_the_models(made_pair, name):
    """A tensor that is made without saying where would be on "meta" here, and meet one that is not."""
    pair = made_pair(name)
    _, head = load_pair(pair.target, pair.draft)
    spec = SpecConfig.model_validate(
        {"algorithm": head.algorithm, "num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 3}
    )
    session = FreeSession(head.target, head, SpecConfig.model_validate(spec))
    with torch.device("meta"):
        trace = session.speculate(RequestSpec(rid="a", input_ids=(5, 6, 7, 8, 9), max_new_tokens=6), chunk=2)
        assert session.generate([5, 6, 7, 8, 9], 6) == list(trace.ends[0].output_ids)
        assert session.confirm([5, 6, 7, 8, 9], trace.ends[0].output_ids) is not None
    assert all(isinstance(one, np.ndarray) for one in trace.tensors.values())


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_weights_are_held_once_and_each_view_computes_in_its_own_dtype(made_pair, name):
    pair = made_pair(name)
    target, head = load_pair(pair.target, pair.draft, held=torch.bfloat16)
    narrow = head.computing(torch.bfloat16)
    assert narrow.target.embedding.data_ptr() == target.embedding.data_ptr()
    assert (target.dtype, narrow.target.dtype, target.embedding.dtype) == (torch.float32, *[torch.bfloat16] * 2)
    wide, rough = (one.read([1, 2, 3, 4], keep=head.states) for one in (target, narrow.target))
    assert head.features(wide.states).dtype == torch.float32
    assert narrow.features(rough.states).dtype == torch.bfloat16
    error = (narrow.features(rough.states).float() - head.features(wide.states)).abs().max()
    assert 0 < error < 0.1 * head.features(wide.states).abs().max()
