"""What mutants change is what they say, on copies only."""

import pytest
import torch

from harness.engine_side.mutants import armed  # noqa: F401  (makes every act known)
from harness.engine_side.mutants.acts_verify import _line
from harness.engine_side.mutants.registry import ACTS, Scene, Share

# Two requests: "a" with rows 0..2, "b" with rows 3..4 (half read), both after a retraction of "b".
SHARES = [Share("a", 0, 3, 10, True), Share("b", 3, 2, 20, False, 1)]


def scene(memory=None, shares=SHARES, step=0, **args):
    return Scene(args=args, memory={} if memory is None else memory, shares=shares, step=step)


def ran(name, values, **args):
    """The values an act leaves, with those it was given unharmed."""
    before = {key: value.clone() for key, value in values.items()}
    made = ACTS[name](args.pop("at_scene", None) or scene(**args), values)
    assert all(torch.equal(values[key], before[key]) for key in before), f"{name} wrote into what it was given"
    return {key: value.tolist() for key, value in made.items()}


def rows(*values):
    return {"ids": torch.tensor(values)}


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("add", {"by": 1}, [2, 3, 4, 5, 6]),
        ("add", {"by": -1, "at": "inner"}, [1, 1, 2, 4, 4]),
        ("add", {"by": 9, "at": "last-request"}, [1, 2, 3, 4, 14]),
        ("zero", {"at": "last"}, [1, 2, 0, 4, 0]),
        ("zero", {"at": "border"}, [1, 2, 3, 4, 0]),
        ("zero", {"at": "retracted"}, [1, 2, 3, 4, 0]),
        ("previous_row", {}, [1, 1, 2, 4, 4]),
        ("previous_row", {"at": "last"}, [1, 2, 2, 4, 4]),
        ("next_row", {}, [2, 3, 3, 5, 5]),
        ("first_row", {}, [1, 1, 1, 4, 4]),
        ("neighbour", {}, [4, 5, 5, 1, 2]),
        ("neighbour", {"at": "last"}, [1, 2, 5, 4, 3]),
        ("restart", {}, [-9, -8, -7, -16, -15]),
    ],
)
def test_acts_on_rows(name, args, expected):
    assert ran(name, rows(1, 2, 3, 4, 5), field="ids", **args) == {"ids": expected}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("features_rolled", [[5, 6, 1, 2, 3, 4]]),
        ("feature_repeated", [[1, 2, 3, 4, 3, 4]]),
        ("feature_missing", [[1, 2, 3, 4]]),
        ("one_feature", [[5, 6]]),
    ],
)
def test_acts_on_features(name, expected):
    values = {"hidden": torch.tensor([[1, 2, 3, 4, 5, 6]])}
    assert ran(name, values, field="hidden", parts=3) == {"hidden": expected}


def test_vocabulary_map_is_applied_twice_or_not_at_all():
    values = {"map": torch.tensor([0, 2, 5, 9])}
    assert ran("map_twice", values) == {"map": [0, 3, 8, 9]}, "offsets 0, 1, 3, 6 twice, as far as the largest id"
    assert ran("map_left_out", values) == {"map": [0, 1, 2, 3]}


def test_narrow_mask_loses_a_column_of_every_row_and_keeps_its_length():
    shares = [Share("a", 0, 2, 1, True), Share("b", 2, 2, 2, True)]  # rows of 1 + 2 and 2 + 2 columns
    values = {
        "mask": torch.tensor([11, 12, 13, 21, 22, 23, 31, 32, 33, 34, 41, 42, 43, 44]),
        "next_token": torch.tensor([[1, -1], [1, -1]]),
    }
    made = ran("mask_narrow", values, at_scene=scene(shares=shares))
    assert made == {"mask": [12, 13, 22, 23, 32, 33, 34, 42, 43, 44, 0, 0, 0, 0]}


def test_last_request_is_nobody_in_a_batch_of_one():
    alone = scene(shares=SHARES[:1], field="ids", at="last-request", by=1)
    assert ran("add", rows(1, 2, 3), at_scene=alone) == {"ids": [1, 2, 3]}


def test_frozen_holds_the_first_step_of_each_round():
    memory, seen = {}, []
    for step, value in [(0, 5), (1, 6), (2, 7), (0, 8), (1, 9)]:
        made = ACTS["frozen"](scene(memory, step=step, field="ids"), rows(value))
        seen.append(int(made["ids"][0]) if made else value)
    assert seen == [5, 5, 5, 8, 8]


def test_from_before_hands_on_what_the_same_request_had_a_round_earlier():
    memory = {}
    act, one = ACTS["from_before"], [Share("a", 0, 1, 0)]
    assert act(scene(memory, one, field="ids"), rows(5))["ids"].tolist() == [5]
    assert act(scene(memory, one, step=1, field="ids"), rows(6)) == {}
    assert act(scene(memory, one, field="ids"), rows(7))["ids"].tolist() == [5]


def test_second_best_leaves_the_best_out():
    one = scene(shares=[Share("a", 0, 1, 0)], field="ids")
    one.logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    assert ran("second_best", {"ids": torch.tensor([[1, 2]])}, at_scene=one) == {"ids": [[2, 3]]}


#      0
#     / \
#    1   2
#    |   |
#    3   4
TREE = {"next_token": torch.tensor([[1, 3, 4, -1, -1]]), "next_sibling": torch.tensor([[-1, 2, -1, -1, -1]])}


def test_line_of_a_node_goes_up_to_the_root():
    assert _line(TREE["next_token"][0].tolist(), TREE["next_sibling"][0].tolist(), node=4) == [2, 0]


@pytest.mark.parametrize(("column", "place"), [("parent", 2), ("root", 0), ("stranger", 3)])
def test_mask_bit_changes_one_bit_of_the_last_node(column, place):
    committed, n = 3, 5
    mask = torch.zeros(n * (committed + n), dtype=torch.bool)
    one = scene(shares=[Share("a", 0, n, committed, True)], column=column, value=True)
    made = ran("mask_bit", {**TREE, "mask": mask}, at_scene=one)["mask"]
    assert [index for index, bit in enumerate(made) if bit] == [(n - 1) * (committed + n) + committed + place]


def test_lost_sibling_is_no_longer_linked():
    assert ran("lose_sibling", TREE)["next_sibling"] == [[-1] * 5]


def test_parents_are_swapped_only_where_both_were_kept():
    values = {"parents": torch.tensor([[-1, 0, 1], [-1, 0, 1]]), "selected": torch.tensor([[0, 1, 2], [0, 2, 3]])}
    assert ran("swap_parents", values)["parents"] == [[-1, 1, 0], [-1, 0, 1]]


def walk():
    """A chain of four nodes a request; a accepted one draft, b none."""
    return {
        "predict": torch.tensor([11, 12, 0, 0, 21, 0, 0, 0], dtype=torch.int32),
        "accept_index": torch.tensor([[0, 1, -1, -1], [4, -1, -1, -1]], dtype=torch.int32),
        "drafts": torch.tensor([1, 0], dtype=torch.int32),
        "next_token": torch.tensor([[1, 2, 3, -1], [1, 2, 3, -1]]),
        "target": torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]]),
    }


def test_one_more_goes_on_with_the_first_child():
    made = ran("one_more", walk())
    assert made["accept_index"] == [[0, 1, 2, -1], [4, 5, -1, -1]]
    assert made["drafts"] == [2, 1]
    assert made["predict"] == [11, 12, 13, 0, 21, 22, 0, 0]


def test_one_less_gives_the_last_one_back_and_never_the_root():
    made = ran("one_less", walk())
    assert made["accept_index"] == [[0, -1, -1, -1], [4, -1, -1, -1]]
    assert made["drafts"] == [0, 0]


def test_neighbours_exchange_lengths():
    made = ran("neighbour_length", walk())
    assert made["accept_index"] == [[0, -1, -1, -1], [4, 5, -1, -1]]
    assert made["drafts"] == [0, 1]


def test_bonus_comes_from_elsewhere():
    assert ran("bonus_from_root", walk())["predict"] == [11, 11, 0, 0, 21, 0, 0, 0]
    assert ran("bonus_of_neighbour", walk())["predict"] == [11, 21, 0, 0, 12, 0, 0, 0]


def test_pool_hands_out_again_what_it_handed_out_first():
    memory, act = {}, ACTS["hand_out_again"]
    assert act(scene(memory), {"slots": torch.tensor([1, 2])}) == {}
    assert act(scene(memory), {"slots": torch.tensor([3, 4])})["slots"].tolist() == [3, 1]


def test_finished_request_stays_for_one_batch_however_often_the_scheduler_asks():
    memory, values = {}, {"keep": torch.tensor([0]), "finished": torch.tensor([False, True])}
    kept = []
    for batch in (4, 4, 5):
        one = scene(memory)
        one.batch = batch
        kept.append(ACTS["keep_finished"](one, values)["keep"].tolist())
    assert kept == [[0, 1], [0, 1], [0]]


def test_one_live_request_is_dropped_once():
    memory, values = {}, {"keep": torch.tensor([0, 1, 2])}
    assert ACTS["drop_live"](scene(memory), values)["keep"].tolist() == [0, 1]
    assert ACTS["drop_live"](scene(memory), values) == {}


def test_a_layers_tail_stays_what_it_was_and_the_rest_rotates():
    memory, act = {}, ACTS["tail_kept"]
    ends = [share.last for share in scene(memory, step=1).shares]
    before = torch.arange(100, 100 + max(ends) + 1)
    assert act(scene(memory), {"input_ids": before}) == {}
    made = act(scene(memory, step=1), {"input_ids": torch.arange(max(ends) + 1)})["input_ids"].tolist()
    assert made == [100 + row if row in ends else row for row in range(max(ends) + 1)]


def test_the_first_two_layers_change_places():
    made = ACTS["layers_exchanged"](scene({}), {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]])})
    assert made["ids"].tolist() == [[2, 1, 3], [5, 4, 6]]


def test_a_sampled_verify_gets_other_uniforms_and_another_distribution():
    values = {"nodes": torch.tensor([[0.5], [0.25]]), "final": torch.tensor([0.125, 1.0])}
    assert ran("uniforms_of_neighbour", values) == {"nodes": [[0.25], [0.5]], "final": [1.0, 0.125]}
    assert ran("uniforms_halved", values) == {"nodes": [[0.25], [0.125]]}
    assert ran("final_mirrored", values) == {"final": [0.875, 0.0]}
    values = {"distribution": torch.tensor([[[0.75, 0.25], [0.5, 0.5]]])}
    assert ran("distribution_of_root", values) == {"distribution": [[[0.75, 0.25], [0.75, 0.25]]]}


def test_an_idle_rank_goes_in_with_what_it_should_not_have():
    idle = {"hidden": torch.empty(0, 6), "counts": torch.tensor([3, 0])}
    assert ACTS["narrow"](scene(field="hidden", parts=3), idle)["hidden"].shape == (0, 2)
    assert ran("counts_exchanged", idle) == {"counts": [0, 3]}
    kept = scene()
    kept.state = torch.ones(2, 1)
    assert ran("kept_state", idle, at_scene=kept) == {"hidden": [[1.0], [1.0]]}
    assert [ACTS[name](scene(), {}) for name in ("kept_state", "counts_exchanged")] == [{}] * 2


def test_what_is_handed_over_is_anothers_or_stays_behind():
    assert ran("guess_of_the_target", {"ids": torch.tensor([5, 6]), "guess": torch.tensor([9])}) == {"ids": [9, 6]}
    assert ran("row_of_another", {"row": torch.tensor([0]), "full": torch.tensor([1, 0, 1])}) == {"row": [2]}
    assert ran("row_of_another", {"row": torch.tensor([0]), "full": torch.tensor([1, 0, 0])}) == {}
    assert ran("page_left_behind", {"0": torch.tensor([[1], [2], [3]])}) == {"0": [[1], [0], [3]]}
