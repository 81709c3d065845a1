"""F-020 and F-027 taken for granted: which rows a batch's layers attend in graphs, and a recorded engine agrees."""

import pytest
import torch

from cases.meta.batches import lone_part
from cases.meta.recorded import MTP, judged_anew
from harness.archive.store import read_case
from harness.contract.known_issues import assumed_by
from harness.contract.types import Outcome
from harness.defects.narrow_blocks import Block, block_of, said_narrowly
from harness.defects.refused_states import pooled
from reference.pairs import load_pair
from reference.windows import Reads, Window, cached_rows

TOGETHER, ALONE = "graphs-0.5.13", "graphs-alone-0.5.13"
OFF = "NUMERIC:extend:EXTEND:hidden_out-off"
WIDTH = 4


@pytest.fixture(scope="module")
def layer(mtp_tiny):
    _, head = load_pair(mtp_tiny.target, mtp_tiny.draft)
    return head.layers[1]


def unattended(rounds, layers):
    """How many rows that propose lie behind the last block of a graph's batch."""
    rows = [
        (place * (WIDTH + layer) + layer + length - 1) // WIDTH >= record.graphs["EXTEND"]
        for record in rounds
        if record.mode == "DECODE"
        for place, length in enumerate(record.lens)
        for layer in range(layers)
    ]
    return sum(rows)


def test_a_recorded_engine_is_explained_by_both_and_by_nothing_less(mtp_tiny):
    for assumed in ((), ("F-020",), ("F-027",)):
        verdict, divergences = judged_anew(MTP / TOGETHER, mtp_tiny, *assumed)
        assert verdict.outcome is Outcome.FAIL
        assert {found.signature for found in divergences if not found.cause} == {OFF}
    verdict, divergences = judged_anew(MTP / TOGETHER, mtp_tiny, "F-020", "F-027")
    assert divergences == []
    assert verdict.outcome is Outcome.PASS
    assert assumed_by(verdict.reasons) == ["F-020", "F-027"]


@pytest.mark.parametrize("name", [TOGETHER, ALONE])
def test_only_rows_that_nobody_attended_for_are_left_out(mtp_tiny, name):
    case = read_case(MTP / name)
    left_out = unattended(case.engine.rounds, case.scenario.spec.num_steps)
    everything, _ = judged_anew(MTP / name, mtp_tiny)
    some, divergences = judged_anew(MTP / name, mtp_tiny, "F-020", "F-027")
    assert left_out > 0
    assert divergences == []
    assert everything.compared["hidden_rows"] - some.compared["hidden_rows"] == left_out
    assert everything.compared["extend_inputs"] == some.compared["extend_inputs"]


def block(seed, *, cached, rows, last, h=64):
    draw = torch.Generator().manual_seed(seed)
    count = cached + rows
    return Block(
        tokens=torch.randint(0, 500, (count,), generator=draw).tolist(),
        states=torch.randn(count, h, generator=draw),
        positions=list(range(count)),
        cached=cached,
        last=last,
    )


def alone(layer, one):
    """What the row says that attends all rows of its own request before it."""
    count = one.cached + one.last + 1
    tokens, positions = torch.tensor(one.tokens[:count]), torch.arange(count)
    return layer.forward(tokens, one.states[:count], positions)[0][-1]


def test_blocks_as_wide_as_the_requests_are_each_request_alone(layer):
    blocks = [
        block(1, cached=7, rows=5, last=2),
        block(2, cached=3, rows=5, last=4),
        block(3, cached=9, rows=5, last=1),
    ]
    for said, one in zip(said_narrowly(layer, blocks, width=5, batch=4), blocks, strict=True):
        torch.testing.assert_close(said, alone(layer, one))


def test_a_narrow_block_attends_the_cache_of_whom_it_is_counted_for_and_the_rows_before(layer):
    first, second = block(1, cached=7, rows=5, last=4), block(2, cached=3, rows=5, last=1)
    said = said_narrowly(layer, [first, second], width=4, batch=2)
    # row 4 of the first is the first row of the second block, row 1 of the second its third
    tokens = [*second.tokens[:3], first.tokens[11], *second.tokens[3:5]]
    states = torch.cat((second.states[:3], first.states[11:], second.states[3:5]))
    positions = torch.tensor([0, 1, 2, 11, 3, 4])
    expected = layer.forward(torch.tensor(tokens), states, positions)[0]
    torch.testing.assert_close(said[1], expected[5])
    torch.testing.assert_close(said[0], expected[3])


def test_behind_the_last_block_nothing_is_known_and_padding_has_no_cache(layer):
    blocks = [block(1, cached=7, rows=6, last=2), block(2, cached=3, rows=6, last=5)]
    assert said_narrowly(layer, blocks, width=4, batch=2)[1] is None
    padded = said_narrowly(layer, blocks, width=4, batch=4)[1]
    own = blocks[1]
    states, tokens, positions = own.states[5:9], torch.tensor(own.tokens[5:9]), torch.arange(5, 9)
    torch.testing.assert_close(padded, layer.forward(tokens, states, positions)[0][-1])


def test_what_attends_an_unknown_state_is_not_known(layer):
    first, second = block(1, cached=7, rows=4, last=1), block(2, cached=3, rows=4, last=1)
    first.states[5] = float("nan")
    said = said_narrowly(layer, [first, second], width=4, batch=2)
    assert said[0] is None
    torch.testing.assert_close(said[1], alone(layer, second))


def test_a_block_ends_in_refused_nodes_and_may_begin_before_the_text():
    text, hidden = [11, 12, 13, 14, 15, 16], torch.arange(6.0).repeat(64, 1).T.clone()
    prompt = Window(start=0, stop=1, known=2, proposals=(12, 13, 14))
    decode = Window(start=1, stop=3, known=4, proposals=(15, 16, 17), again=(0, 1, 2))
    verified = torch.full((4, 64), 9.0)
    held = list(cached_rows(text, hidden[:3], [prompt, decode], 2, Reads()))[1]
    found = block_of(held, decode, verified, 2)
    assert found.cached == 0
    assert found.positions == [0, 0, 1, 2, 3, 4]
    assert len(found.tokens) - found.cached == WIDTH + 2
    assert found.tokens[-2:] == [0, 0]
    assert found.last == 3
    assert found.states[0].isnan().all()
    assert found.states[1:, 0].tolist() == [0.0, 1.0, 2.0, 9.0, 9.0]


def test_a_pool_holds_the_last_rows_of_the_step_before_and_what_a_short_chunk_had_not_is_unknown():
    hidden = torch.arange(20.0).reshape(20, 1)
    nodes = 100 + torch.arange(4.0).reshape(4, 1)
    parts = [
        lone_part("PREFILL", index=0, start=0, length=8),
        lone_part("PREFILL", index=1, start=8, length=1),
        lone_part("DECODE", index=2, start=9, length=2),
        lone_part("DECODE", index=3, start=11, length=1),
    ]
    pools = pooled({9: nodes, 11: nodes}, parts, hidden, 2)
    assert sorted(pools) == [9, 11], "behind the long chunk the pool holds the target's own states"
    assert pools[9].isnan().tolist() == [[True], [False]]
    assert pools[9][1].item() == 8.0
    assert pools[11].flatten().tolist() == [102.0, 103.0]


def test_a_neighbour_decides_what_a_request_is_let_accept_though_its_text_is_the_same():
    together, alone = (read_case(MTP / name).engine for name in (TOGETHER, ALONE))
    texts = [next(end.output_ids for end in trace.ends if end.rid == "b") for trace in (together, alone)]
    assert texts[0] == texts[1]
    assert accepted(together, "b") != accepted(alone, "b")


def accepted(trace, rid):
    decodes = [record for record in trace.rounds if record.mode == "DECODE" and rid in record.rids]
    return [record.lens[record.rids.index(rid)] for record in decodes]
