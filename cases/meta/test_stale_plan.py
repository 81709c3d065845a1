"""F-011 where a batch outgrows its CUDA graphs: it attends by an earlier plan. F-029: which rows a NaN then reaches."""

import pytest
import torch

from cases.meta.recorded import MTP, judged_anew
from cases.meta.stale_plan import Planned, Recorded, layer_states, outgrown, proposed, target_states, verified
from harness.archive.store import read_case
from harness.contract.tolerance import budget_for, judge_rows
from harness.contract.types import Outcome
from harness.engines.launch import GRAPH_SIZES
from reference.pairs import load_pair

OUTGROWN, PADDING = "graphs-outgrown-0.5.13", "graphs-padding-0.5.13"
FLOAT16 = budget_for("float16")


@pytest.fixture(scope="module")
def head(mtp_tiny):
    return load_pair(mtp_tiny.target, mtp_tiny.draft, torch.float32, held=torch.float16)[1]


@pytest.fixture(scope="module")
def told():
    return Recorded.of(read_case(MTP / OUTGROWN))


def within(recorded, predicted):
    return judge_rows(engine=recorded.numpy(), truth=predicted.numpy(), budget=FLOAT16).passed


def test_every_verified_row_of_the_recorded_batch_is_what_the_prefills_plan_says_and_none_its_own_texts(told, head):
    rounds = list(outgrown(told.case))
    assert [one.record.index for one in rounds] == [6, 7, 8, 9]
    for one in rounds:
        assert len(one.record.rids) > max(GRAPH_SIZES)
        said = verified(told, head.target, one)
        assert (len(said.recorded), said.rows) == (sum(one.prefill.lens), 15)
        assert within(said.recorded, said.planned).all()
        assert not within(said.recorded, said.own).any()


def test_and_so_is_every_proposing_row_of_the_layers_behind_the_first(told, head):
    rounds = list(outgrown(told.case))
    assert len(rounds) == 4
    for one in rounds:
        (second,) = proposed(told, head, one)
        assert len(second.recorded) == second.rows == 5
        assert within(second.recorded, second.planned).all()


def test_a_row_is_not_a_number_where_any_row_of_its_block_is_though_it_may_not_attend_that_one(told):
    """The first layer is planned anew, a block a request: its proposing row, and nodes behind it that were refused."""
    seen = set()
    for one in outgrown(told.case):
        for rid, length in zip(one.record.rids, one.record.lens, strict=True):
            index, n = one.record.index, told.case.scenario.spec.num_draft_tokens
            nodes = [told.state("hidden_out", index, rid, "VERIFY", 0, slot).isfinite().all() for slot in range(n)]
            said = told.state("hidden_out", index, rid, "EXTEND", 0, length - 1).isfinite().all()
            if all(nodes[:length]):
                seen.add((bool(all(nodes)), bool(said)))
    assert seen == {(True, True), (False, False)}


def test_in_the_next_scenario_it_is_the_row_beside_a_graphs_padding_and_no_other(mtp_tiny):
    case = read_case(MTP / PADDING)
    verdict, divergences = judged_anew(MTP / PADDING, mtp_tiny, "F-010", "F-020", "F-027")
    assert verdict.outcome is Outcome.FAIL
    roots = [found for found in divergences if not found.cause]
    assert [found.signature for found in roots] == ["NUMERIC:extend:EXTEND:hidden_out-nan"]
    assert [(found.round, found.key.rid, found.key.step) for found in roots] == beside_padding(case)


def beside_padding(case):
    """(round, rid, layer) of every proposing row that shares a block of attention with rows of a padded place."""
    n, found = case.scenario.spec.num_draft_tokens, []
    for record in case.engine.rounds:
        captured = record.graphs.get("EXTEND", 0)
        for layer in range(1, case.scenario.spec.num_steps if captured else 1):
            real = len(record.rids) * (n + layer)
            for place, (rid, length) in enumerate(zip(record.rids, record.lens, strict=True)):
                block = (place * (n + layer) + layer + length - 1) // n
                if block < captured and (block + 1) * n > real and captured > len(record.rids):
                    found.append((record.index, rid, layer))
    return found


def rows(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 500, (count,), generator=draw).tolist(), torch.randn(count, 64, generator=draw)


def test_a_plan_made_for_the_batch_itself_is_each_request_alone(head):
    (first, _), (second, _) = rows(1, 5), rows(2, 7)
    plan = [Planned(cached=tuple(first[:3]), rows=2), Planned(cached=tuple(second[:4]), rows=3)]
    said = target_states(head.target, plan, first[3:] + second[4:], [3, 4, 4, 5, 6])
    alone = [head.target.forward(torch.tensor(text))[start:] for text, start in ((first, 3), (second, 4))]
    torch.testing.assert_close(said, torch.cat(alone))


def test_rows_of_a_foreign_block_attend_its_cache_and_each_other_at_their_own_positions(head):
    (cached, states), (tokens, fed) = rows(3, 2), rows(4, 4)
    plan = [Planned(cached=tuple(cached), rows=3, states=states)]
    said = layer_states(head.layers[1], plan, tokens, fed, [9, 10, 30, 31])
    assert len(said) == 3, "nobody attends for the fourth row"
    expected = head.layers[1].forward(
        torch.tensor(cached + tokens[:3]), torch.cat((states, fed[:3])), torch.tensor([0, 1, 9, 10, 30])
    )[0]
    torch.testing.assert_close(said, expected[2:])


def test_a_plan_longer_than_the_batch_covers_all_of_it_and_what_is_not_a_number_is_the_whole_blocks(head):
    tokens, fed = rows(5, 3)
    fed[2] = float("nan")
    plan = [Planned(cached=(), rows=2), Planned(cached=(), rows=24)]
    said = layer_states(head.layers[0], plan, tokens, fed, [4, 5, 6])
    assert said.isfinite().all(dim=1).tolist() == [True, True, False]
    said = layer_states(head.layers[0], [Planned(cached=(), rows=24)], tokens, fed, [4, 5, 6])
    assert said.isfinite().all(dim=1).tolist() == [False, False, False]
